"""User code that a type checker must reject: at each line with a comment, and nowhere else."""

import finetune as ft

recipe = ft.SFT(ft.Model("m")).with_data(ft.Data("d.jsonl", "messages"))

recipe.with_optim(lr="fast")  # error
recipe.with_optim(warmpu=3)  # error
recipe.with_optim(name=3)  # error
recipe.with_optim(warmup=3)
recipe.with_lora(alhpa=3)  # error
recipe.with_lora(ft.Batch())  # error
recipe.with_lora(16, targets=["q_proj"])  # error
recipe.with_qlora(r="8")  # error
recipe.with_qlora(r=8)
recipe.with_batch(overlong="cut")  # error
recipe.with_batch(row=4)  # error
recipe.with_kernels(head="big")  # error
recipe.with_evaluation(evry=3)  # error
recipe.with_saving(keep=None)  # error
recipe.with_data("d.jsonl")  # error
recipe.with_epochs("all")  # error
recipe.with_steps(1.5)  # error
recipe.with_backend(3)  # error
recipe.with_everything()  # error
ft.SFT(train_on="answers")  # error
ft.SFT(epoch=3)  # error
ft.Pretrain(train_on="all")
ft.Model(nme="m")  # error
ft.Data("d.jsonl")  # error
ft.Optim(lr="fast")  # error
ft.launch(recipe, backnd="ddp")  # error
ft.launch(recipe, backend="ddp", processes="two")  # error
ft.launch(recipe, precision="fp8")  # error
ft.launch(recipe, resume="yes")  # error
ft.train(recipe, outptu="runs/mine")  # error
ft.plan(recipe, procesess=2)  # error
ft.plan(recipe, gpu="H100-80", nods=2)  # error
ft.plan(recipe).page()  # error
ft.plan(recipe, gpu="H100-80").explain()  # error
ft.export("run", "folder", merg=True)  # error
ft.prove(recipe, steps="3")  # error
ft.load("run", step="newest")  # error
ft.generate("run", ["hello"])  # error
ft.open_run("run").newst()  # error
ft.trian(recipe)  # error
