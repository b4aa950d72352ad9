"""What a loss makes of stored tokens: the weight that each token gets in the gradient, without a forward pass."""
