"""What autograd keeps of a layer and of the head."""
