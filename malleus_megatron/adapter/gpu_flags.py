"""A recipe written for GPUs, read for a CPU: what is replaced, what is left out, what is refused.

The rules speak of Megatron 0.19's flags. A flag that stands in no table works on a CPU as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from malleus_megatron.errors import BadInputError

Arity = Literal["none", "one", "many"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Words that stand on every command line in CPU mode, since Megatron's default is a GPU's."""

    words: tuple[str, ...]
    instead_of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A flag that only says how a GPU does the same work: on a CPU it goes without."""

    flag: str
    arity: Arity
    instead: str = ""
    unless: str = ""
    """Another flag in whose company this one stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutValue:
    """One value of a flag that takes many; without any value left the flag goes too."""

    flag: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A flag without which the run would be another run, and that a CPU cannot serve."""

    flag: str
    why: str
    allowed: tuple[str, ...] = ()
    """Values that a CPU can serve."""
    only: str = ""
    """Refuse only a value that has this text in it."""
    unless: str = ""
    """Another flag in whose company a CPU can serve it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCommandLine:
    """What Megatron is given in CPU mode."""

    arguments: tuple[str, ...]
    replaced: tuple[str, ...]
    """One phrase for each thing that differs from the recipe, in the order of the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A flag and the words up to the next one; `flag` is empty for words before any flag."""

    flag: str
    values: tuple[str, ...]
    joined: bool

    def words(self) -> Iterator[str]:
        if self.joined:
            yield f"{self.flag}={self.values[0]}"
            yield from self.values[1:]
        else:
            yield from ([self.flag] if self.flag else [])
            yield from self.values

    def without_flag(self, arity: Arity) -> "_Group":
        """What stays when the flag goes: words that were not its values."""
        taken = {"none": 0, "one": 1, "many": len(self.values)}[arity]
        return _Group(flag="", values=self.values[taken:], joined=False)


def for_cpu(arguments: Sequence[str]) -> CpuCommandLine:
    """Make of a GPU recipe's command line one that trains the same way on a CPU.

    Raises:
        BadInputError: flags that have no equivalent on a CPU; the message names all of them.
    """
    groups = tuple(_groups(arguments))
    _refuse(groups)
    present = {group.flag for group in groups}
    left_out = {
        rule.flag: rule for rule in LEFT_OUT if not (rule.unless and rule.unless in present)
    }
    kept = [_without_values(_kept(group, left_out)) for group in groups]
    words = [word for group in kept for word in group.words()]
    replaced = [
        f"{rule.flag} → {rule.instead}" if rule.instead else f"without {rule.flag}"
        for flag, rule in left_out.items()
        if flag in present
    ]
    replaced += [
        f"without {rule.flag} {rule.value}"
        for rule in LEFT_OUT_VALUES
        if any(rule.flag == group.flag and rule.value in group.values for group in groups)
    ]
    forced = [rule for rule in FORCED if not _stands_in(groups, rule.words)]
    return CpuCommandLine(
        arguments=(*words, *(word for rule in forced for word in rule.words)),
        replaced=(*(rule.instead_of for rule in forced), *replaced),
    )


def _groups(arguments: Sequence[str]) -> Iterator[_Group]:
    flag, values, joined = "", list[str](), False
    for word in arguments:
        if not word.startswith("--"):
            values.append(word)
            continue
        if flag or values:
            yield _Group(flag=flag, values=tuple(values), joined=joined)
        flag, equals, value = word.partition("=")
        values, joined = [value] if equals else [], bool(equals)
    if flag or values:
        yield _Group(flag=flag, values=tuple(values), joined=joined)


def _kept(group: _Group, left_out: dict[str, LeftOut]) -> _Group:
    rule = left_out.get(group.flag)
    return group if rule is None else group.without_flag(rule.arity)


def _without_values(group: _Group) -> _Group:
    unwanted = {rule.value for rule in LEFT_OUT_VALUES if rule.flag == group.flag}
    if not unwanted & set(group.values):
        return group
    values = tuple(value for value in group.values if value not in unwanted)
    return _Group(flag=group.flag if values else "", values=values, joined=group.joined)


def _stands_in(groups: Sequence[_Group], words: tuple[str, ...]) -> bool:
    """True if the recipe itself says these words, and nothing else by that flag."""
    said = [group.values[: len(words) - 1] for group in groups if group.flag == words[0]]
    return bool(said) and all(values == words[1:] for values in said)


def _refuse(groups: Sequence[_Group]) -> None:
    """Raise once for all flags that a CPU cannot serve; a later value of a flag wins."""
    last = {group.flag: group for group in groups}
    offenders = [
        f"  {' '.join(last[rule.flag].words())}: {rule.why}"
        for rule in REFUSED
        if rule.flag in last
        and (not rule.unless or rule.unless not in last)
        and _is_refused(rule, last[rule.flag].values)
    ]
    if offenders:
        listed = "\n".join(offenders)
        raise BadInputError(
            "CPU mode has nothing in place of these flags; leave them out or run on a GPU:\n"
            + listed
        )


def _is_refused(rule: Refused, values: tuple[str, ...]) -> bool:
    if rule.only:
        return any(rule.only in value for value in values)
    return not (values and set(values) <= set(rule.allowed))


FORCED: tuple[Forced, ...] = (
    Forced(words=("--distributed-backend", "gloo"), instead_of="nccl → gloo"),
    Forced(words=("--transformer-impl", "local"), instead_of="transformer_engine → local modules"),
    Forced(words=("--no-masked-softmax-fusion",), instead_of="masked softmax fusion → torch"),
    Forced(words=("--no-rope-fusion",), instead_of="RoPE fusion → torch"),
    Forced(words=("--no-persist-layer-norm",), instead_of="persistent layer norm → torch"),
    Forced(
        words=("--no-gradient-accumulation-fusion",),
        instead_of="gradient accumulation fusion → an addition",
    ),
    Forced(words=("--num-workers", "0"), instead_of="data workers → none"),
)

_OVERLAP = "the same work in order"
_TE = "the local module"
_IN_RAM = "everything is in RAM"

LEFT_OUT: tuple[LeftOut, ...] = (
    # Communication.
    LeftOut(flag="--pipeline-model-parallel-comm-backend", arity="one", instead="gloo"),
    LeftOut(flag="--use-ring-exchange-p2p", arity="none", instead="isend and irecv"),
    LeftOut(flag="--nccl-communicator-config-path", arity="one"),
    LeftOut(flag="--high-priority-stream-groups", arity="many"),
    LeftOut(flag="--high-priority-a2a-comm-stream", arity="none"),
    LeftOut(flag="--use-sharp", arity="none", instead="gloo"),
    LeftOut(flag="--sharp-enabled-group", arity="one"),
    LeftOut(flag="--use-nccl-ub", arity="none", instead="plain buffers"),
    LeftOut(flag="--disable-symmetric-registration", arity="none"),
    LeftOut(flag="--symmetric-ar-type", arity="one", instead="all-reduce"),
    LeftOut(flag="--tp-comm-overlap-cfg", arity="one"),
    # Overlap that needs streams: the sums are the same.
    LeftOut(flag="--overlap-moe-expert-parallel-comm", arity="none", instead=_OVERLAP),
    LeftOut(flag="--delay-wgrad-compute", arity="none", instead=_OVERLAP),
    LeftOut(flag="--overlap-dispatch-backward-with-experts-wgrad", arity="none", instead=_OVERLAP),
    LeftOut(flag="--ep-overlap-early-attn-memory-release", arity="none"),
    LeftOut(flag="--defer-embedding-wgrad-compute", arity="none", instead=_OVERLAP),
    LeftOut(flag="--wgrad-deferral-limit", arity="one"),
    # Kernels.
    LeftOut(flag="--use-flash-attn", arity="none", instead="local attention"),
    LeftOut(flag="--attention-backend", arity="one", instead="local attention"),
    LeftOut(flag="--flash-attention-version", arity="one"),
    LeftOut(flag="--cross-entropy-fusion-impl", arity="one", instead="native"),
    LeftOut(flag="--fused-residual-rmsnorm", arity="none", instead=_TE),
    LeftOut(flag="--use-transformer-engine-op-fuser", arity="none", instead=_TE),
    LeftOut(flag="--use-te-activation-func", arity="none", instead=_TE),
    LeftOut(flag="--mla-down-proj-fusion", arity="none", instead=_TE),
    LeftOut(flag="--te-rng-tracker", arity="none", instead="Megatron's own tracker"),
    LeftOut(flag="--moe-grouped-gemm", arity="none", instead="sequential experts"),
    LeftOut(flag="--moe-single-grouped-weight", arity="none"),
    LeftOut(flag="--moe-single-grouped-bias", arity="none"),
    LeftOut(flag="--use-grouped-gemm-for-dense-mlp", arity="none", instead=_TE),
    LeftOut(flag="--use-grouped-gemm-for-shared-expert", arity="none", instead=_TE),
    LeftOut(flag="--moe-permute-fusion", arity="none", instead="torch"),
    LeftOut(flag="--moe-router-fusion", arity="none", instead="torch"),
    # Memory: offloading to the host means nothing where the host trains.
    LeftOut(flag="--cpu-offloading-num-layers", arity="one", instead=_IN_RAM),
    LeftOut(flag="--cpu-offloading-retain-pinned-cpu-buffers", arity="none"),
    LeftOut(flag="--fine-grained-activation-offloading", arity="none", instead=_IN_RAM),
    LeftOut(flag="--offload-modules", arity="many"),
    LeftOut(flag="--optimizer-cpu-offload", arity="none", instead=_IN_RAM),
    LeftOut(flag="--overlap-cpu-optimizer-d2h-h2d", arity="none"),
    LeftOut(flag="--use-torch-optimizer-for-cpu-offload", arity="none"),
    LeftOut(
        flag="--use-precision-aware-optimizer", arity="none", instead="the same states in fp32"
    ),
    # Measuring GPUs.
    LeftOut(flag="--profile", arity="none", unless="--use-pytorch-profiler"),
    LeftOut(flag="--record-memory-history", arity="none"),
    LeftOut(flag="--gpu-sniff-test-interval", arity="one"),
    LeftOut(flag="--log-energy", arity="none"),
    LeftOut(flag="--log-straggler", arity="none"),
    LeftOut(flag="--log-max-attention-logit", arity="none"),
)

LEFT_OUT_VALUES: tuple[LeftOutValue, ...] = (
    # Recomputed without keeping the output, which needs an extension that is built in the run.
    LeftOutValue(flag="--recompute-modules", value="layernorm"),
    LeftOutValue(flag="--recompute-modules", value="mla_up_proj"),
    LeftOutValue(flag="--recompute-modules", value="moe_act"),
)

_TE_ONLY = "only Transformer Engine has it"
_CUDA_GRAPH = "CUDA graphs need a GPU"
_USERBUFFERS = "userbuffers need a GPU"
_CP = "context parallelism needs Transformer Engine's attention"
_PACKED = "packed sequences need Transformer Engine's attention"
_FSDP = "this FSDP is written for GPUs"
_STATE = "optimizer states below fp32 need Transformer Engine's Adam"

REFUSED: tuple[Refused, ...] = (
    Refused(flag="--fp8-format", why="FP8 needs a GPU"),
    Refused(flag="--fp8-param-gather", why="FP8 needs a GPU"),
    Refused(flag="--fp4-format", why="FP4 needs a GPU"),
    Refused(flag="--fp4-param-gather", why="FP4 needs a GPU"),
    Refused(flag="--reuse-grad-buf-for-mxfp8-param-ag", why="FP8 needs a GPU"),
    Refused(flag="--te-precision-config-file", why=_TE_ONLY),
    Refused(flag="--qk-clip", why=_TE_ONLY),
    Refused(
        flag="--qk-l2-norm", why="Megatron's local layers leave it out", unless="--num-experts"
    ),
    Refused(flag="--moe-latent-size", why=_TE_ONLY),
    Refused(flag="--position-embedding-type", why=_TE_ONLY, only="relative"),
    Refused(flag="--enable-cuda-graph", why=_CUDA_GRAPH),
    Refused(flag="--external-cuda-graph", why=_CUDA_GRAPH),
    Refused(flag="--cuda-graph-impl", why=_CUDA_GRAPH, allowed=("none",)),
    Refused(flag="--cuda-graph-scope", why=_CUDA_GRAPH),
    Refused(flag="--cuda-graph-modules", why=_CUDA_GRAPH),
    Refused(flag="--optimizer-cuda-graph", why=_CUDA_GRAPH),
    Refused(flag="--delay-offload-until-cuda-graph", why=_CUDA_GRAPH),
    Refused(flag="--rl-training-cuda-graphs", why=_CUDA_GRAPH),
    Refused(flag="--tp-comm-overlap", why=_USERBUFFERS),
    Refused(flag="--context-parallel-size", why=_CP, allowed=("1",)),
    Refused(flag="--hierarchical-context-parallel-sizes", why=_CP, allowed=("1",)),
    Refused(flag="--hybrid-context-parallel", why=_CP),
    Refused(flag="--sft", why=_PACKED),
    Refused(flag="--dataloader-inter-document-masking", why=_PACKED),
    Refused(flag="--tensor-parallel-num-weight-shards", why=_TE_ONLY),
    Refused(flag="--expert-tensor-parallel-num-weight-shards", why=_TE_ONLY),
    Refused(flag="--use-kitchen-attention", why="its kernels are a GPU's"),
    Refused(flag="--experimental-attention-variant", why="its kernels are a GPU's"),
    Refused(flag="--batch-invariant-mode", why="its kernels are a GPU's"),
    Refused(flag="--hybrid-layer-pattern", why="Mamba's kernels are a GPU's", only="M"),
    Refused(flag="--hybrid-override-pattern", why="Mamba's kernels are a GPU's", only="M"),
    Refused(
        flag="--transformer-impl",
        why="it cannot train",
        allowed=("local", "transformer_engine"),
    ),
    Refused(
        flag="--moe-token-dispatcher-type",
        why="its backends move tokens between GPUs",
        allowed=("allgather", "alltoall"),
    ),
    Refused(flag="--moe-enable-deepep", why="DeepEP moves tokens between GPUs"),
    Refused(flag="--moe-paged-stash", why="it pages GPU memory"),
    Refused(flag="--use-megatron-fsdp", why=_FSDP),
    Refused(flag="--use-torch-fsdp2", why=_FSDP),
    Refused(flag="--init-model-with-meta-device", why=_FSDP),
    Refused(flag="--main-grads-dtype", why=_STATE, allowed=("fp32",)),
    Refused(flag="--main-params-dtype", why=_STATE, allowed=("fp32",)),
    Refused(flag="--exp-avg-dtype", why=_STATE, allowed=("fp32",)),
    Refused(flag="--exp-avg-sq-dtype", why=_STATE, allowed=("fp32",)),
    Refused(flag="--inprocess-restart", why="it restarts NCCL"),
    Refused(flag="--yaml-cfg", why="Megatron reads that file itself; give its settings as flags"),
)
