"""What the training experiments of conf/experiment show: a file each, named as theirs."""
