"""One training loop on accelerate: resumable, logged as JSON lines, ending in a checkpoint transformers can load."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_scheduler,
)

from dspine_hub.checkpoints.loading import cast_for_storage
from dspine_hub.checkpoints.targets import LoadedTarget
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.environment import describe_environment
from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.prompts import read_prompts
from dspine_hub.generation_dspine import summarize
from dspine_hub.modeling_dspine import DSpineForSpeculation
from dspine_hub.training.config import TrainConfig
from dspine_hub.training.data import Sequences, step_indices
from dspine_hub.training.objective import CausalLMObjective, DSpineObjective


def new_drafter(config: TrainConfig, target, tokenizer) -> DSpineForSpeculation:
    """Create an untrained drafter for a target; what both must share is taken from the target."""
    text = target.config.get_text_config()
    facts = LoadedTarget(target, tokenizer).record(str(config.model.get("target_id", config.target)))
    fields = {name: value for name, value in config.model.items() if name != "target_id"}
    drafter = DSpineForSpeculation(
        DSpineConfig(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_target_layers=text.num_hidden_layers,
            target=facts,
            **fields,
        )
    )
    drafter.initialize_transfer_space(target.get_output_embeddings().weight.detach().float().cpu())
    return drafter


@torch.no_grad()
def held_out_acceptance(drafter, target, tokenizer, prompts: list[str], max_new_tokens: int) -> dict:
    """Decode prompts greedily with the real loop; returns [`summarize`]'s table."""
    was_training = drafter.training
    drafter.eval()
    requests = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(target.device)
        output = drafter.spec_generate(
            target, ids, max_new_tokens=max_new_tokens, temperature=0.0, return_dict_in_generate=True
        )
        requests.append(output.statistics)
    drafter.train(was_training)
    return summarize(requests)


class Trainer:
    """A run: build it from a [`TrainConfig`], then call [`~Trainer.run`]."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.accelerator = Accelerator(mixed_precision=config.mixed_precision)
        world = self.accelerator.num_processes
        self.micro = config.micro_batch_size or max(1, config.batch_size // world)
        if config.batch_size % (self.micro * world):
            raise DSpineHubError(
                f"`batch_size` must be a multiple of micro_batch_size * processes = {self.micro} * {world}, got "
                f"{config.batch_size}."
            )
        set_seed(config.seed)
        device = self.accelerator.device
        self.tokenizer = AutoTokenizer.from_pretrained(config.target)
        self.train_data = Sequences(config.data.train, config.data, self.tokenizer)
        self.eval_data = Sequences(config.data.eval, config.data, self.tokenizer) if config.data.eval else None
        self.prompts = []
        if config.kind == "drafter":
            if config.acceptance is not None:
                self.prompts = read_prompts(config.acceptance.prompts)[: config.acceptance.count]
            dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
            self.target = AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype).to(device)
            self.model = new_drafter(config, self.target, self.tokenizer).to(device).bind(self.target, self.tokenizer)
            objective = DSpineObjective(self.model, self.target, config.objective, config.steps)
        else:
            self.model = Qwen3ForCausalLM(Qwen3Config(**config.model)).to(device)
            objective = CausalLMObjective(torch.compile(self.model) if config.compile else self.model)
        settings = config.optimizer
        decayed = [p for p in self.model.parameters() if p.requires_grad and p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.requires_grad and p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=device.type == "cuda",
        )
        scheduler = get_scheduler(
            "cosine_with_min_lr",
            optimizer,
            num_warmup_steps=round(settings.warmup_ratio * config.steps),
            num_training_steps=config.steps,
            scheduler_specific_kwargs={"min_lr_rate": settings.final_ratio},
        )
        self.objective, self.optimizer = self.accelerator.prepare(objective, optimizer)
        self.scheduler = scheduler
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.step = 0

    def _generator(self, step: int, micro: int) -> torch.Generator:
        generator = torch.Generator(self.accelerator.device)
        rank = self.accelerator.process_index
        return generator.manual_seed(hash((self.config.seed, step, micro, rank)) % 2**63)

    def _train_step(self) -> dict[str, torch.Tensor]:
        config, accelerator = self.config, self.accelerator
        indices = step_indices(len(self.train_data), config.batch_size, self.step, config.seed)
        mine = indices.reshape(accelerator.num_processes, -1)[accelerator.process_index]
        pieces = mine.reshape(-1, self.micro)
        total: dict[str, torch.Tensor] = {}
        for number, piece in enumerate(pieces):
            ids, mask = (tensor.to(accelerator.device) for tensor in self.train_data.batch(piece))
            last = number == len(pieces) - 1
            with nullcontext() if last else accelerator.no_sync(self.objective):
                with accelerator.autocast():
                    loss, metrics = self.objective(ids, mask, self.step, self._generator(self.step, number))
                accelerator.backward(loss / len(pieces))
            for name, value in metrics.items():
                total[name] = total.get(name, 0) + value / len(pieces)
        total["grad_norm"] = accelerator.clip_grad_norm_(self.objective.parameters(), config.optimizer.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Average the metrics over held-out batches, and decode the held-out prompts."""
        result: dict[str, float] = {}
        self.objective.eval()
        if self.eval_data is not None:
            count = min(self.config.eval_batches, len(self.eval_data) // self.micro) or 1
            for number in range(count):
                indices = step_indices(len(self.eval_data), min(self.micro, len(self.eval_data)), number, 0)
                ids, mask = (tensor.to(self.accelerator.device) for tensor in self.eval_data.batch(indices))
                with self.accelerator.autocast():
                    _, metrics = self.objective(ids, mask, self.step, self._generator(0, number))
                for name, value in metrics.items():
                    result[f"eval_{name}"] = result.get(f"eval_{name}", 0.0) + float(value) / count
        if self.prompts and self.accelerator.is_main_process:
            with self.accelerator.autocast():
                table = held_out_acceptance(
                    self.model, self.target, self.tokenizer, self.prompts, self.config.acceptance.max_new_tokens
                )
            result["eval_tau_pooled"] = table["tau_pooled"]
            result["eval_acceptance_per_slot"] = table["acceptance_per_slot"]
        self.objective.train()
        self.accelerator.wait_for_everyone()
        return result

    def _log(self, record: dict) -> None:
        if self.accelerator.is_main_process:
            with (self.config.output / "log.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, **record}) + "\n")

    def _checkpoints(self) -> list[Path]:
        folders = (self.config.output / "checkpoints").glob("step-*")
        return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))

    def save_checkpoint(self) -> None:
        """Write everything a resumed run needs; older checkpoints beyond `keep_checkpoints` go."""
        folder = self.config.output / "checkpoints" / f"step-{self.step}"
        # renamed when complete: a run killed in between resumes from the one before
        partial = folder.with_name(f"partial-{self.step}")
        self.accelerator.save_state(str(partial))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            for old in self._checkpoints()[: -self.config.keep_checkpoints]:
                shutil.rmtree(old)

    def resume(self) -> None:
        """Continue from the newest checkpoint of the output folder, if there is one; later log lines are dropped."""
        found = self._checkpoints()
        if found:
            self.accelerator.load_state(str(found[-1]))
            self.step = int(found[-1].name.removeprefix("step-"))
        log = self.config.output / "log.jsonl"
        if log.exists() and self.accelerator.is_main_process:
            lines = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= self.step]
            log.write_text("".join(line + "\n" for line in lines))

    def run(self) -> dict:
        """Train to the end and save the model.

        Returns:
            `dict`: The last evaluation.
        """
        config = self.config
        config.output.mkdir(parents=True, exist_ok=True)
        self.resume()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        evaluation: dict = {}
        self.objective.train()
        with Progress(*columns, disable=not self.accelerator.is_main_process) as progress:
            task = progress.add_task("training", total=config.steps, completed=self.step, note="")
            while self.step < config.steps:
                metrics = self._train_step()
                if self.step % config.log_every == 0 or self.step == config.steps:
                    record = {name: float(value) for name, value in metrics.items()}
                    record["learning_rate"] = self.scheduler.get_last_lr()[0]
                    self._log(record)
                    progress.update(task, note=f"loss {record['loss']:.3f}")
                progress.update(task, completed=self.step)
                if self.step % config.eval_every == 0 or self.step == config.steps:
                    evaluation = self.evaluate()
                    self._log(evaluation)
                if self.step % config.save_every == 0 or self.step == config.steps:
                    self.save_checkpoint()
        # a finished run that is started again
        evaluation = evaluation or self.evaluate()
        if self.accelerator.is_main_process:
            self.save_model(evaluation)
        return evaluation

    def save_model(self, evaluation: dict) -> None:
        """Write the trained model in bfloat16, its tokenizer for a target, and what made it (`training.json`)."""
        cast_for_storage(self.model)
        self.model.save_pretrained(self.config.output)
        if self.config.kind == "causal_lm":
            self.tokenizer.save_pretrained(self.config.output)
        record = {
            "config": json.loads(self.config.model_dump_json()),
            "environment": describe_environment(),
            "steps": self.step,
            "evaluation": evaluation,
        }
        (self.config.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
