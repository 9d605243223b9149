"""Format a prediction as text: verdict, moments of a step, tables, and suggested changes."""

from collections.abc import Iterable, Sequence

from finetune.planner.estimate.advice import Option, micro_tokens
from finetune.planner.estimate.fewest_changes import Change
from finetune.planner.estimate.hardware import Machine
from finetune.planner.estimate.judges import Judge, judges
from finetune.planner.estimate.predict import Prediction
from finetune.planner.estimate.sampling_cost import most_rows, sampling
from finetune.planner.estimate.sharding import resident
from finetune.planner.estimate.timing import uncertainty

BAR = 36


def page(prediction: Prediction, changes: Sequence[Change] = ()) -> str:
    """The complete page as text."""
    parts = [verdict(prediction), moments(prediction), table(prediction), time(prediction)]
    if prediction.workload.layout.axes.any:
        parts.insert(1, division(prediction))
    found = judges(prediction.plan.recipe, cpu=False)
    if found:
        parts.append(judge_words(found))
    if changes:
        parts.append(what_to_change(changes))
    return "\n\n".join(parts)


def step_parts(prediction: Prediction) -> list[str]:
    """The parts of a step that samples completions, one per line; empty for other methods."""
    times, sampled = prediction.times, sampling(prediction.workload)
    asked = prediction.workload.sampled
    if sampled is None or asked is None:
        return []
    state = sum(resident.state(prediction.workload).values())
    most = most_rows(prediction.workload, state, prediction.usable)
    held = size(sampled.units + sampled.weights)
    gathered = f"; {held} of weights are gathered for it" if sampled.units + sampled.weights else ""
    return [
        f"  sampling      {duration(times.sampling)} if all completions are as long as allowed "
        f"({asked.longest} tokens): {sampled.rows} at once, {size(sampled.cache)} of keys and "
        f"values, {size(sampled.logits)} of logits and noise{gathered}",
        f"                sampling_rows={most} is the most that fits",
        "  rewards       not counted: they are your functions",
        *([f"  scoring       {duration(times.scoring)}"] if times.scoring else []),
        f"  training      {duration(times.training)}, of which",
    ]


def judge_words(found: Sequence[Judge]) -> str:
    """Memory of reward models, as text."""
    lines = [
        f"reward model {each.name}: {size(each.weights)} of weights, {size(each.activations)} of "
        "activations, in a process next to rank 0"
        for each in found
    ]
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes in GB, or in MB below 1 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 0.95e9 else f"{count / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    if seconds < 0.01:
        return f"{1e3 * seconds:.2g} ms"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def machine_words(machine: Machine) -> str:
    nodes = f" in {machine.nodes} nodes" if machine.nodes > 1 else ""
    return f"{machine.count} x {machine.gpu.name}{nodes}"


def network_words(machine: Machine) -> str:
    """The assumed bandwidth of a GPU to other nodes, as text."""
    return (
        f"{machine.network / 1e9:.3g} GB/s between nodes for each GPU (one port of a whole node: "
        "--network 10gbe/node)"
    )


def verdict(prediction: Prediction) -> str:
    """Whether the plan fits, how fast it is, and what limits its speed."""
    words = {
        "safe": "fits",
        "tight": "fits, but tightly: a longer row may not",
        "no": "DOES NOT FIT",
    }
    totals, times = prediction.totals, prediction.times
    name, spread = prediction.workload.layout.name, uncertainty(prediction.workload)
    lines = [
        f"{name} on {machine_words(prediction.machine)}: {words[prediction.status]}",
        f"  memory   {size(totals.allocated)} of {size(prediction.usable)} usable per GPU, most in "
        f"'{prediction.timeline.peak.name}'",
        f"           reserved about {size(totals.reserved)}, process about {size(totals.process)} "
        f"({size(totals.low)} to {size(totals.high)})",
        f"  speed    {duration(times.step)} a step ({duration(times.step / spread)} to "
        f"{duration(times.step * spread)}), {times.tokens_per_second:,.0f} tokens/s, bound by "
        f"{times.bound}",
    ]
    wider = micro_tokens(prediction.plan, prediction.workload, prediction.machine)
    if wider is not None:
        lines.append(
            f"  wider    batch.micro_tokens={wider} fits too: fewer and larger forward passes, the "
            "same steps"
        )
    workload = prediction.workload
    if workload.shape.experts is not None:
        lines.append(
            "  note     operations of experts are counted one by one, as PyTorch runs them; with "
            "fused routing a step takes about half the time"
        )
    for note in machine_notes(prediction.machine, workload.compute == 2 and not workload.fp16):
        lines.append(f"  note     {note}")
    if prediction.machine.nodes > 1:
        lines.append(f"  network  {network_words(prediction.machine)}")
    if prediction.host:
        known = prediction.machine.host_memory
        limit = f" of {size(known)}" if known else ", give --host-ram to check it"
        loads, trains = (each * prediction.machine.per_node for each in resident.host(workload))
        both = f": {size(loads)} while loading, then {size(trains)}" if loads and trains else ""
        lines.append(f"  host     {size(prediction.host)} per node{limit}{both}")
    if paged := resident.paged(workload):
        lines.append(
            f"  paged    {size(paged)} of moments per GPU beside the memory above: the driver "
            "keeps them on the GPU while it has room, else on the host, where they are counted"
        )
    if prediction.disk:
        lines.append(f"  disk     {size(prediction.disk)} per node, besides checkpoints")
    return "\n".join(lines)


def division(prediction: Prediction) -> str:
    """Memory by stage, communication along each axis, and the pipeline bubble."""
    plan, step = prediction.plan, prediction.times.step
    lines = [f"the mesh: {plan.mesh.words()}"]
    if len(prediction.stages) > 1:
        sizes = ", ".join(size(found.peak.total) for found in prediction.stages)
        lines.append(f"  stages      {sizes}")
        lines.append(f"  schedule    {plan.pipeline_words()}")
    for link in prediction.links:
        where = "between nodes" if link.crosses else "inside a node"
        lines.append(
            f"  {link.axis:11} {size(link.sent):>9} sent in a step, {where}: "
            f"{duration(link.seconds)}, {link.seconds / step:.1%} of it"
        )
    return "\n".join(lines)


def emulated(machine: Machine) -> str:
    """Note on bf16 for a GPU without bf16 units."""
    gpu = machine.gpu
    return (
        f"{gpu.name} has no bf16 units: PyTorch computes it in fp32, at "
        f"{gpu.flops * gpu.single / 1e12:.3g} TFLOPS instead of {gpu.flops / 1e12:.3g}, and the "
        "time here assumes that; training refuses bf16 on it: use --precision fp16, the 16-bit "
        "type of its tensor cores"
    )


def machine_notes(machine: Machine, bf16: bool) -> list[str]:
    """Notes on the GPUs of a machine."""
    slow = [emulated(machine)] if bf16 and not machine.gpu.bf16 else []
    return [*slow, *([machine.gpu.note] if machine.gpu.note else [])]


def moments(prediction: Prediction) -> str:
    """A bar chart of the moments of a step, relative to usable memory."""
    lines = ["moments of a step"]
    peak, largest = prediction.timeline.peak, prediction.timeline.peak.total
    scale = max(prediction.usable, largest)
    limit = round(BAR * prediction.usable / scale)
    for moment in prediction.timeline.moments:
        filled = round(BAR * moment.total / scale)
        bar = "#" * filled + "." * max(0, limit - filled)
        mark = "  <- peak" if moment is peak else ""
        lines.append(f"  {moment.name:27} {bar:{BAR}} {size(moment.total):>9}{mark}")
    return "\n".join(lines)


def table(prediction: Prediction) -> str:
    """Memory in use at the peak, by component."""
    lines = ["at the peak"]
    for name, count in prediction.timeline.peak.parts.items():
        if count >= 5e5:
            lines.append(f"  {name:27} {size(count):>9}")
    shape, workload = prediction.source.shape, prediction.workload
    share = workload.trained / shape.parameters
    lines.append(
        f"model: {shape.parameters:,} parameters, {workload.trained:,} trained ({share:.2%}); "
        f"shapes from {prediction.source.where}"
    )
    return "\n".join(lines)


def time(prediction: Prediction) -> str:
    """Time and communication of a step, and the complete run."""
    times, volume = prediction.times, prediction.volume
    hidden = f"{times.overlap:.0%} of communication overlaps with it"
    lines = [
        "one step",
        *step_parts(prediction),
        f"  products      {duration(times.compute)}: {times.flops / 1e12:,.0f} TFLOP per GPU at "
        f"{times.reached:.0%} of its peak (an assumption); {hidden} (another)",
        f"                {times.flops_per_token / 1e9:,.1f} GFLOP per token",
        f"  other         {duration(times.moves)}: other operations, and the optimizer",
    ]
    if times.bound == "launches":
        lines.append(
            f"  launches      {duration(times.launches)}: operations are started one by one, and "
            "the GPU waits; more rows in a micro-batch take no longer"
        )
    if volume.total:
        lines.append(
            f"  communication {duration(times.communication)}: {size(volume.total)} sent per GPU"
        )
    if times.offload:
        disk = ", reads and writes of the disk" if prediction.disk else ""
        how = f"copies over PCIe, AdamW on CPU{disk}"
        lines.append(f"  offload       {duration(times.offload)}: {how}")
    return "\n".join([*lines, whole_run(prediction)])


def whole_run(prediction: Prediction) -> str:
    """Steps, time and cost of the complete run."""
    if prediction.seconds is None or prediction.gpu_hours is None:
        packing = prediction.plan.recipe.batch.packing
        more = " and --row-tokens (their average length), to count packs" if packing else ""
        return f"whole run: unknown until the rows are counted; give --rows{more}"
    cost = f", {prediction.cost:,.2f} at the given price" if prediction.cost is not None else ""
    reference, evaluation = prediction.reference_seconds, prediction.evaluation_seconds
    parts = [f"{duration(reference)} of them for the reference"] if reference is not None else []
    parts += [f"{duration(evaluation)} of them for evaluation"] if evaluation is not None else []
    besides = f" ({', '.join(parts)})" if parts else ""
    return (
        f"whole run: {prediction.steps:,} steps, {duration(prediction.seconds)}{besides}, "
        f"{prediction.gpu_hours:,.1f} GPU-hours{cost}"
    )


def what_to_change(
    changes: Sequence[Change], heading: str = "possible changes, and what each saves"
) -> str:
    """Single changes with the memory that each saves."""
    return "\n".join([heading, *map(_change, changes)])


def _change(change: Change) -> str:
    fits = "fits" if change.fits else "not enough by itself"
    return f"  -{size(change.gain):>8}  {change.what}: {change.setting} ({fits})"


def ranking(options: Iterable[Option], reason: str, shown: int = 8) -> str:
    """A table of the backends that fit, best first, with the reason for the first."""
    rows = list(options)
    more = len(rows) - shown
    if not rows:
        return "no backend fits"
    wide = max([22, *(len(each.words) for each in rows[:shown])])
    lines = [
        reason,
        "",
        f"  {'backend':{wide}} {'rows':>4} {'recompute':9} {'memory':>9} {'tokens/s':>10}",
    ]
    for each in rows[:shown]:
        workload = each.workload
        tight = "  tight" if each.status == "tight" else ""
        lines.append(
            f"  {each.words:{wide}} {workload.micro_rows:4} {each.recompute:9} "
            f"{size(each.peak.total):>9} {each.times.tokens_per_second:10,.0f}{tight}"
        )
    if more > 0:
        lines.append(f"  and {more} that are slower or less simple: --json has all")
    return "\n".join(lines)
