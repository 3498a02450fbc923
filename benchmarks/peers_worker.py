"""The process that decodes for one peer at one precision: benchmarks/peers.py starts and asks it.

It runs in the peer's own environment, so nothing but the standard library is imported before the peer.
On stdin comes one JSON object a line. The first one is the settings; its answer says that the models are
loaded, so that no start-up is measured. Each further one is a round, {"mode", "prompts", "new",
"concurrency"}, answered by {"wall", "cpu", "outputs"} (seconds of all threads, token ids), or
{"bandwidth": true}, answered by bytes a second. A failure is answered by {"error"} and ends the process.
What libraries print goes to stderr, which is the worker's log.

Every peer decodes greedily and goes on after the end of a text, until each prompt has its new tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

# What transformers looks up in the prompt at a time: as many tokens as our shorter drafts have.
LOOKED_UP = 3


class Ours:
    """dspark's engine: mode "plain", or "k=3" for 3 draft tokens a step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from dspark.decode.parts import step_bytes
        from dspark.models.checkpoint import load_drafter
        from dspark.models.target import load_target

        torch.set_num_threads(settings["threads"])
        dtype = getattr(torch, settings["precision"])
        self.target = load_target(settings["target"], "cpu", dtype)
        self.drafter = load_drafter(settings["drafter"], self.target)
        self.capacity = settings["capacity"]
        self.engines: dict[tuple[str, int], Any] = {}
        self.facts = {
            "version": f"{version('dspark')}, torch {version('torch')}",
            "bytes": step_bytes(self.target, None, rows=0, k=0, context=0),
            "parameters": self.target.weight_bytes // dtype.itemsize,
        }
        self.target.pack()
        self.drafter.pack()

    def decode(
        self, mode: str, prompts: list[list[int]], new: int, concurrency: int
    ) -> list[list[int]]:
        from dspark.decode.engine import Engine, Request
        from dspark.decode.loop import closed_loop

        if (mode, concurrency) not in self.engines:
            k = 0 if mode == "plain" else int(mode.removeprefix("k="))
            self.engines[mode, concurrency] = Engine(
                self.target, self.drafter, k=k, concurrency=concurrency, capacity=self.capacity
            )

        def request(name: str, turn: int, _answers: list[list[int]]) -> Request:
            return Request(name, turn, prompts[int(name)], new)

        names = [(str(index), 1) for index in range(len(prompts))]
        rows = closed_loop(self.engines[mode, concurrency], names, request)
        outputs = {int(row.request.prompt_id): row.output for row in rows}
        return [outputs[index] for index in range(len(prompts))]

    def bandwidth(self) -> float:
        """Bytes a second that this many threads read."""
        import torch

        from dspark.decode.parts import read_bandwidth

        return read_bandwidth(torch.device("cpu"))


class Transformers:
    """`generate` with its default cache, padded on the left; mode "lookup" assists it by prompt lookup."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(settings["threads"])
        self.model = AutoModelForCausalLM.from_pretrained(
            settings["target"], dtype=getattr(torch, settings["precision"]), local_files_only=True
        ).eval()
        # Without an EOS nothing ends early; no penalties of the model's own either.
        self.model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)
        self.facts = {
            "version": f"transformers {version('transformers')}, torch {version('torch')}"
        }

    def decode(
        self, mode: str, prompts: list[list[int]], new: int, concurrency: int
    ) -> list[list[int]]:
        import torch

        assisted = {"prompt_lookup_num_tokens": LOOKED_UP} if mode == "lookup" else {}
        outputs = []
        for start in range(0, len(prompts), concurrency):
            batch = prompts[start : start + concurrency]
            width = max(map(len, batch))
            tokens = torch.tensor([[0] * (width - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            made = self.model.generate(
                input_ids=tokens, attention_mask=mask, max_new_tokens=new, **assisted
            )
            outputs += made[:, width:].tolist()
        return outputs


class LlamaCpp:
    """llama.cpp's server, in this process: its slots decode in parallel."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import xllamacpp  # type: ignore[import-not-found]

        params = xllamacpp.CommonParams()
        params.model.path = settings["gguf"]
        params.n_parallel = settings["concurrency"]
        params.n_ctx = settings["concurrency"] * settings["capacity"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        params.cache_ram_mib = 0  # every round repeats the prompts, and none may be remembered
        params.port = 0
        self.server = xllamacpp.Server(params)
        system = xllamacpp.get_system_info().removeprefix("CPU : ")
        flags = [flag.split("=")[0].strip() for flag in system.split("|") if "= 1" in flag]
        self.facts = {"version": f"xllamacpp {version('xllamacpp')} ({' '.join(flags)})"}

    def decode(
        self, mode: str, prompts: list[list[int]], new: int, concurrency: int
    ) -> list[list[int]]:
        def complete(prompt: list[int]) -> list[int]:
            body = {
                "prompt": prompt,
                "n_predict": new,
                "ignore_eos": True,  # it forbids the tokens that end a text
                "temperature": 0,
                "samplers": ["top_k"],
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
            }
            request = urllib.request.Request(
                f"{self.server.listening_address}/completion",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["tokens"]

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(complete, prompts))


class Vllm:
    """vLLM on a CPU, its engine in this process and compiled as it comes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that its CPU time is this process's
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CACHE_ROOT": settings["cache"],
        }
        from vllm import LLM  # type: ignore[import-not-found]

        self.llm = LLM(
            model=settings["target"],
            dtype=settings["precision"],
            max_model_len=settings["capacity"],
            max_num_seqs=settings["concurrency"],
            enable_prefix_caching=False,  # every round repeats the prompts
        )
        self.facts = {"version": f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}"}

    def decode(
        self, mode: str, prompts: list[list[int]], new: int, concurrency: int
    ) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        outputs = []
        for start in range(0, len(prompts), concurrency):
            batch = [{"prompt_token_ids": row} for row in prompts[start : start + concurrency]]
            made = self.llm.generate(batch, params, use_tqdm=False)
            outputs += [list(one.outputs[0].token_ids) for one in made]
        return outputs


PEERS = {"dspark": Ours, "transformers": Transformers, "llama.cpp": LlamaCpp, "vllm": Vllm}


def timed(peer: Any, question: dict[str, Any]) -> dict[str, Any]:
    """One round: seconds of the clock and of all threads of this process, and the token ids."""
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = peer.decode(**question)
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "outputs": outputs,
    }


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        settings = json.loads(sys.stdin.readline())
        peer: Any = PEERS[settings["peer"]](settings)
        print(json.dumps(peer.facts), file=answers, flush=True)
        for line in sys.stdin:
            question = json.loads(line)
            if "bandwidth" in question:
                answer: dict[str, Any] = {"bandwidth": peer.bandwidth()}
            else:
                answer = timed(peer, question)
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        reason = reason.removeprefix("UserError: ")  # ours, complete without it
        print(json.dumps({"error": reason}), file=answers, flush=True)
        raise


if __name__ == "__main__":
    main()
