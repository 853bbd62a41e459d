"""transformers' Trainer on a tiny model with random weights."""

# %%
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
config = BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
model = BertForSequenceClassification(config)


# %%
class Sentences(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 32, (64, 8), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": (self.ids[i, 0] > 15).long()}


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), num_train_epochs=2, per_device_train_batch_size=8,
    use_cpu=True, report_to=[], save_strategy="no", logging_steps=4, learning_rate=1e-2,
)  # fmt: skip
# %%
trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences())
done = trainer.train()
# %%
evaluated = trainer.evaluate()
predicted = trainer.predict(Sentences())
result = {
    "loss": done.training_loss, "steps": done.global_step, "world": arguments.world_size,
    "eval": evaluated["eval_loss"], "predicted": len(predicted.predictions),
}  # fmt: skip
# %%
trainer.accelerator.end_training()
