"""How much memory a model will take, told from its description: no weights are read, no memory is taken."""
