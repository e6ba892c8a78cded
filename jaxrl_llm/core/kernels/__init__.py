"""Array programs written for the compiler: products, blocks of the vocabulary, caps, barriers."""
