"""Read what lies in a folder or repository: configs of any format, tensors, targets, and whether a pair fits."""
