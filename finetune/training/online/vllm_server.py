"""Sample completions with a running vLLM server, which gets the adapter before each sampling.

The adapter is written to a folder of the run that the server can read, and loaded with
`/v1/load_lora_adapter` under a new name, because vLLM (0.32) keeps cached prefixes of a name. A
request has the token ids of the prompt, and a seed that depends on (seed, step, prompt, number).
The server returns token ids with their log-probabilities, which the loss compares with its own.
"""

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file

from finetune.checkpoints.pretrained import adapter_keys
from finetune.errors import FinetuneError, TrainingFailure
from finetune.exporters import vllm
from finetune.inference.batch import cached_attention
from finetune.inference.decoder import Row
from finetune.inference.endpoint import exchange, send
from finetune.inference.load import ADAPTER_WEIGHTS
from finetune.inference.sampling import Completion
from finetune.methods.online import Online
from finetune.runs.environment import hide

OLDEST = (0, 32)
"""Oldest version of vLLM that this code was run with."""
KEY = "VLLM_API_KEY"
"""Environment variable with the server's key, as vLLM reads it."""
CHECKED, CHECKED_TOKENS = 8, 16
"""Prompts and tokens of each greedy answer that are compared with this process's model."""
NEAR = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.05}
"""Largest difference of log-probabilities in nats at each precision, several times its rounding."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""vLLM's names of precisions."""
UNLOADING_SECONDS = 30.0
"""Timeout of unloading an adapter, which may wait for requests in progress."""


class ServerFailure(TrainingFailure):
    """The server failed after training began; the model's weights are not affected."""


class VLLMServer:
    """A vLLM server that serves the base of a run; rank 0 checks it and loads the adapters.

    Args:
        recipe: Has the URL.
        folder: Folder for the adapters.
        precision: Precision of the training: fp32, bf16 or fp16.
        stops: Token ids that end a completion.
    """

    def __init__(self, recipe: Online, folder: Path, precision: str, stops: Sequence[int]) -> None:
        assert recipe.vllm_server_base_url is not None
        self.recipe, self.folder, self.precision = recipe, folder, precision
        self.url = recipe.vllm_server_base_url.rstrip("/").removesuffix("/v1")
        self.stops = list(stops)
        self._key = os.environ.get(KEY)
        self.name: str | None = None
        """Name of the loaded adapter; the same on every rank."""
        self._written: Path | None = None
        self._run = uuid.uuid4().hex[:8]
        self._number = 0
        self._compared: set[bool] = set()
        """Whether the adapters that were compared change the base."""

    # Checks ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check version, context and log-probabilities of the server, before the model is loaded.

        Raises:
            FinetuneError: there is no such server, or it cannot sample for this run.
        """
        version = str(self._exchange("/version").get("version"))
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if numbers < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise self._refusal(f"vLLM {version} is older than {oldest}, the oldest one tried")
        listed = self._exchange("/v1/models").get("data") or []
        served = [each for each in listed if not each.get("parent")]
        if not served:
            raise self._refusal("/v1/models lists no model")
        context, needed = served[0].get("max_model_len") or 0, self.recipe.batch.max_length
        if context < needed:
            raise self._refusal(
                f"max_model_len is {context}, and batch.max_length is {needed}; start the server "
                f"with --max-model-len {needed}"
            )
        if self.recipe.temperature != 1 and not self._processed(str(served[0]["id"])):
            raise self._refusal(
                "its log-probabilities are those before the temperature, and temperature is "
                f"{self.recipe.temperature:g}; start it with --logprobs-mode processed_logprobs"
            )

    def _processed(self, model: str) -> bool:
        """Whether log-probabilities are those of the distribution that is sampled from.

        If only one token is allowed, its probability is 1 there.
        """
        fields = {"model": model, "prompt": [self.stops[0]], "max_tokens": 1, "temperature": 0.5,
                  "allowed_token_ids": [self.stops[0]], "logprobs": 0}  # fmt: skip
        (choice,) = self._exchange("/v1/completions", fields)["choices"]
        return choice["logprobs"]["token_logprobs"][0] > -1e-3

    def compare_if_due(self, model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> None:
        """Compare once with the first adapter, and once with one that changes the base.

        A new adapter changes nothing, so that the first comparison would not notice a server that
        ignores it.

        Raises:
            FinetuneError: the answers differ.
        """
        changes = any(
            bool(each.any()) for name, each in model.named_parameters() if ".lora_B." in name
        )
        if changes not in self._compared:
            self.compare(model, prompts)
            self._compared.add(changes)

    def compare(self, model: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> None:
        """Compare greedy answers and their log-probabilities with those of the model.

        A token may differ from the model's own choice only if their log-probabilities are equal
        within `NEAR`, as at ties.

        Raises:
            FinetuneError: they differ: another base, another dtype, or an ignored adapter.
        """
        near = NEAR[self.precision]
        model.eval()
        limit = min(CHECKED_TOKENS, self.recipe.max_completion_length)
        for prompt in prompts:
            answer = self._complete(prompt, 0.0, 0, limit)
            ids = torch.tensor([[*prompt, *answer.ids]], device=next(model.parameters()).device)
            with torch.no_grad(), cached_attention(model):
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            logps = logits.float().log_softmax(-1).cpu()  # greedy: no temperature
            said = torch.tensor(answer.ids)[:, None]
            own = logps.gather(1, said)[:, 0]  # (tokens,)
            below = float((logps.max(-1).values - own).max())
            apart = float((own - torch.tensor(answer.logps)).abs().max())
            if max(below, apart) > near:
                raise self._refusal(
                    f"greedy answers differ from this run's model: for the prompt {prompt[-8:]} "
                    f"(last ids) it answers {answer.ids[:8]}, where log-probabilities differ by "
                    f"{max(below, apart):.2g} nats, at most {near:g} are due to rounding in "
                    f"{self.precision}; serve the base {self.recipe.model.name} with "
                    f"--dtype {DTYPES[self.precision]}"
                )

    # Sampling ----------------------------------------------------------------------------------

    def publish(self, model: torch.nn.Module) -> str:
        """Write the model's adapter and load it in the server; returns its new name.

        Raises:
            FinetuneError: the server does not load it.
        """
        assert isinstance(model, PeftModel)
        self._number += 1
        name = f"finetune-{self._run}-{self._number}"
        written = self.folder.resolve() / name
        _write_adapter(model, written)
        try:
            send(
                f"{self.url}/v1/load_lora_adapter", self._key,
                self.recipe.vllm_server_timeout, {"lora_name": name, "lora_path": str(written)},
            )  # fmt: skip
        except FinetuneError as error:
            shutil.rmtree(written)
            raise self._not_loaded(error, model) from None
        before, self.name, old = self.name, name, self._written
        self._written = written
        if before is not None:
            self._unload(before)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        return name

    def __call__(self, wanted: Sequence[Row], seed: int, step: int) -> list[Completion]:
        """One completion per request, in order, by the adapter that was published last.

        Raises:
            ServerFailure: the server does not answer, or not with the ids of a completion.
        """

        def complete(one: Row) -> Completion:
            return self._complete(
                one.prompt, one.temperature, seed_of(seed, step, *one.name), one.limit
            )

        with ThreadPoolExecutor(min(len(wanted), self.recipe.sampling_rows)) as pool:
            return list(pool.map(complete, wanted))

    def close(self) -> None:
        """Unload the adapter and delete its folder."""
        if self.name is not None:
            self._unload(self.name)
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)

    def _complete(
        self, prompt: Sequence[int], temperature: float, seed: int, limit: int
    ) -> Completion:
        assert self.name is not None, "publish first"
        body = request(self.name, prompt, temperature, seed, limit, self.stops)
        answer = self._exchange("/v1/completions", body)
        try:
            (choice,) = answer["choices"]
            ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if not ids or len(ids) != len(logps) or choice["prompt_token_ids"] != list(prompt):
                raise ValueError("token ids and log-probabilities do not match the request")
        except (LookupError, TypeError, ValueError) as error:
            raise ServerFailure(
                f"vllm_server_base_url: {hide(self.url)}: the reply is not a completion with token "
                f"ids ({type(error).__name__}: {error}): {str(answer)[:200]}"
            ) from None
        ended = choice["finish_reason"] == "stop"
        # The entropy is estimated from the sampled tokens.
        return Completion(list(ids), ended, -sum(logps), tuple(logps))

    # Requests ----------------------------------------------------------------------------------

    def _exchange(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        timeout = self.recipe.vllm_server_timeout
        try:
            return exchange(f"{self.url}{path}", self._key, timeout, body)
        except FinetuneError as error:
            kind = FinetuneError if self.name is None else ServerFailure
            raise kind(f"vllm_server_base_url: {error}") from None

    def _unload(self, name: str) -> None:
        """Unload an adapter; one that a restarted server does not know needs no unloading."""
        with contextlib.suppress(FinetuneError):
            send(
                f"{self.url}/v1/unload_lora_adapter", self._key, UNLOADING_SECONDS,
                {"lora_name": name},
            )  # fmt: skip

    def _not_loaded(self, error: FinetuneError, model: PeftModel) -> FinetuneError:
        rank = vllm.served_rank(model.peft_config["default"].to_dict())
        start = (
            "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora "
            f"--max-lora-rank {rank}, on a machine that reads {self.folder.resolve()}"
        )
        kind = FinetuneError if self.name is None else ServerFailure
        return kind(f"vllm_server_base_url: the server does not load the adapter: {error}; {start}")

    def _refusal(self, problem: str) -> FinetuneError:
        return FinetuneError(f"vllm_server_base_url: {hide(self.url)}: {problem}")


def request(
    model: str, prompt: Sequence[int], temperature: float, seed: int, limit: int,
    stops: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """A request for one completion, in which no default of the server or the base is left.

    Args:
        model: Name of the adapter.
        prompt: Token ids.
        temperature: 0 selects the most likely token.
        seed: Seed of this completion.
        limit: Maximum tokens.
        stops: Token ids that end it; the sampled one is part of the completion.
    """
    return {
        "model": model, "prompt": list(prompt), "temperature": temperature, "seed": seed,
        "max_tokens": limit, "stop_token_ids": list(stops), "ignore_eos": True, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "logprobs": 0, "return_token_ids": True,
        "skip_special_tokens": False,
    }  # fmt: skip


def seed_of(seed: int, step: int, row: int, number: int) -> int:
    """Seed of a completion below 2**63, a hash of the run's seed, step, prompt and number."""
    key = f"{seed},{step},{row},{number}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1


def _write_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter as PEFT does, from parameters that are gathered on this rank."""
    folder.mkdir(parents=True)
    parameters = dict(model.named_parameters())
    names = [name for name, each in parameters.items() if each.requires_grad]
    tensors = {
        key: parameters[name].detach().cpu().contiguous()
        for key, name in adapter_keys(model, names).items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    model.peft_config["default"].save_pretrained(str(folder))
