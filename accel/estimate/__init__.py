"""How much memory a model will take, from its description: no weights are read, no memory is allocated; not its
placement (`big_models`).
"""
