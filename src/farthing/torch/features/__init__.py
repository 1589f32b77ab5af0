"""Public or privately learnt features of images that a small private head can be trained on."""
