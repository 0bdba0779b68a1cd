PRELOAD = ("deepspeed", "torch._inductor.compile_fx", "transformers.models.llama.modeling_llama")
