"""How much memory a model will take, from its description: no weights are read, no memory is allocated. Not its
placement (`big_models`).
"""
