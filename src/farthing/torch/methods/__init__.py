"""Train networks by methods beyond DP-SGD, one paper per file: AdaDP, DpOpt, DP-AGD."""
