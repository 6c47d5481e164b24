"""Every differentiable operation, one file a family: forward directly above backward, arrays in, arrays out."""
