"""Training methods for networks beyond DP-SGD, one paper a file: AdaDP, DpOpt, DP-AGD."""
