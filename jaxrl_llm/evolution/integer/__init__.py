"""EGG: a recurrent language model of int8 weights and activations, evolved by votes of pairs."""
