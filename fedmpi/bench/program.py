"""The parts of the benchmark, one after the other."""

import numpy as np
import torch

from fedmpi.bench import baselines, directions, links, output, scaling
from fedmpi.bench.measure import Contestant, contest, describe_machine
from fedmpi.bench.output import milliseconds, rate, ratio, table
from fedmpi.bench.rounds import Rounds, contestants, facts
from fedmpi.bench.workloads import HERE, WORKLOADS, words_of
from fedmpi.comm.agreement import agree
from fedmpi.comm.host import share_of_cores
from fedmpi.config.build import read_command_line
from fedmpi.errors import AgreedUserError, UserError
from fedmpi.settings import nearest
from fedmpi.streams import derive
from fedmpi.text import format_bytes

TARGETS = {"cnn": 0.9, "mlp": 0.6, "many_clients": 0.8}  # of the hand-written flat loop's round
POINTS = [(1, 1), (2, 1), (5, 1), (10, 1), (20, 1), (2, 2), (5, 2), (5, 4)]  # (q, clients per rank)
HELD_OUT = (10, 3)  # predicted from them
HIDDEN = [12, 126, 1258, 12580, 125786]  # of an MLP with 795 h + 10 parameters: 10^4 to 10^8


class Benchmark:
    """All parts under one set of arguments (`fedmpi.bench.__main__`). Collective on the link."""

    def __init__(self, chosen, link):
        self.chosen, self.link = chosen, link
        torch.set_num_threads(share_of_cores(link))
        self.seconds = chosen.seconds or (1.0 if chosen.quick else 10.0)
        self.least = 3 if chosen.quick else 7
        self.algorithms = [name.strip() for name in chosen.algorithms.split(",") if name.strip()]
        self.extra = chosen.set.split()
        self.machine = describe_machine(link)
        self.results = output.Results(self.machine, link.rank == 0)
        agree(link, self._check)

    def _check(self):
        if not self.algorithms:
            raise UserError("--algorithms: expected names like fedavg,fafed")
        name = self.chosen.workload
        if name is not None and name not in WORKLOADS:
            raise UserError(f"--workload {name}: expected one of {', '.join(WORKLOADS)}{nearest(name, WORKLOADS)}")
        for algorithm in self.algorithms:
            read_command_line([*words_of(name or "fashion"), *self.extra, "--algorithm", algorithm])
        self.projection = scaling.read_projection(self.chosen.project) if self.chosen.project else None
        if self.projection and self.link.size == 1 and None in (self.projection.bw, self.projection.lat):
            raise UserError(
                f"--project {self.chosen.project}: one rank has no link to measure: give bw=... and lat=..."
            )
        self.old = output.read(self.chosen.compare) if self.chosen.compare and self.link.rank == 0 else None
        self._write()

    def run(self):
        """Measure, print, write, compare."""
        parts = {
            "link": self.measure_link,
            "round": self.measure_rounds,
            "workloads": self.measure_workloads,
            "settings": self.measure_settings,
            "scaling": self.measure_scaling,
            "directions": self.measure_directions,
        }
        self.results.say("machine", *table(["", ""], list(self.machine.items()))[1:])
        chosen = self.chosen.parts or list(parts)
        if self.projection and "scaling" not in chosen:
            chosen = [*chosen, "scaling"]
        for part in chosen:
            parts[part]()
            agree(self.link, self._write)  # what a later part may lose is kept
        if self.old is not None:
            self.results.say("", f"compared with {self.chosen.compare}", *self.results.compare(self.old))

    def _write(self):
        if self.link.rank == 0 and self.chosen.json:
            self.results.write(self.chosen.json)

    def _contest(self, rivals, seconds=None):
        return contest(self.link, rivals, seconds or self.seconds, self.least)

    def _rounds(self, workload, *words):
        return Rounds(self.link, [*words_of(workload, self.chosen.quick), *self.extra, *words])

    def measure_link(self):
        """Sums of flat buffers, by size and transport; a model's tensors at once and one by one."""
        if self.link.size == 1:
            self.results.say("", "the link: one rank has nothing to sum; start two or more, mpirun -np 2 ...")
            return
        sizes = links.QUICK_SIZES if self.chosen.quick else links.SIZES
        rows, one_call = [], True
        for nbytes in sizes:
            times = links.measure_size(self.link, nbytes, self.seconds / len(sizes), one_call)
            # Spinning on an oversubscribed node takes seconds for milliseconds of work: leave larger ones out.
            one_call = one_call and times["one call"].median < self.seconds / len(sizes)
            for name, one in times.items():
                self.results.keep(f"link/{nbytes}/{name}", one)
            best = min(times["shared"].median, times["allreduce"].median)
            names = ("shared", "allreduce", "one call", "copy")
            rows.append([format_bytes(nbytes), *(milliseconds(times[n]) if n in times else "-" for n in names)])
            rows[-1] += [rate(nbytes, best), rate(nbytes, times["copy"].median)]
            rows[-1] += [ratio(times["allreduce"] / times["shared"])]
        titles = ["bytes", "shared ms", "allreduce ms", "one call ms", "copy ms", "GB/s", "copy GB/s"]
        titles.append("allreduce/shared")
        self.results.say("", f"the link: float32 sums over {self.link.size} ranks; median (quartiles)")
        self.results.say(*table(titles, rows))
        rows = []
        for model, tensors in links.MODELS.items():
            times = links.measure_model(self.link, tensors, self.seconds / 5)
            for name, one in times.items():
                self.results.keep(f"link/{model}/{name}", one)
            flat = times["flat"]
            rows.append([model, format_bytes(4 * sum(tensors)), *(milliseconds(one) for one in times.values())])
            rows[-1] += [ratio(times["per tensor"] / flat), ratio(times["per tensor"] / times["flat, plain"])]
        titles = ["model", "bytes", "flat ms", "flat, plain ms", "per tensor ms", "per tensor/flat", "../flat, plain"]
        self.results.say("", *table(titles, rows))

    def measure_rounds(self):
        """Rounds of each algorithm: their parts, their floor."""
        default = ["fashion"] if self.chosen.quick else ["fashion", "cnn"]
        for workload in [self.chosen.workload] if self.chosen.workload else default:
            self._rounds(workload, "--algorithm", self.algorithms[0]).close()  # what libraries load is nobody's memory
            opened = {name: self._rounds(workload, "--algorithm", name) for name in self.algorithms}
            rivals = [rival for name, rounds in opened.items() for rival in contestants(name, rounds)]
            times = self._contest(rivals)
            rows = [facts(name, rounds, times, self.seconds / 4) for name, rounds in opened.items()]
            for row in rows:
                key = f"round/{workload}/{row['algorithm']}"
                self.results.keep(key, row["seconds"])
                self.results.keep(f"{key}/floor", row["floor"])
                self.results.keep(f"{key}/ratio", row["ratio"], "")
                self.results.keep(f"{key}/memory", row["memory"], "B")
                for part, seconds in row["split"].items():
                    self.results.keep(f"{key}/{part}", seconds)
            self._show_rounds(workload, opened, rows, times)
            for rounds in opened.values():
                rounds.close()

    def _show_rounds(self, workload, opened, rows, times):
        some = next(iter(opened.values()))
        self.results.say("", f"rounds of {workload}: {WORKLOADS[workload][2]}; {' '.join(self.extra)}".rstrip("; "))
        self.results.say(f"  {some.num_clients} clients on {self.link.size} ranks, {some.dim:,} parameters")
        shown = [
            [row["algorithm"], milliseconds(row["seconds"]), milliseconds(row["floor"]), ratio(row["ratio"])]
            + [f"{row['client steps per second']:.0f}", format_bytes(row["bytes"]), format_bytes(row["memory"])]
            + [row["transport"]]
            for row in rows
        ]
        titles = ["algorithm", "round ms", "floor ms", "round/floor", "client-steps/s", "sent", "memory", "by"]
        self.results.say(*table(titles, shown))
        parts = list(rows[0]["split"])
        shown = [
            [row["algorithm"], *(f"{1e3 * row['split'][part]:.3g}" for part in parts), f"{_update_share(row):.1%}"]
            for row in rows
        ]
        self.results.say("", *table(["ms of a round", *parts, "update/local step"], shown))
        if {"fedavg", "fafed"} <= set(opened):
            apart = times["fafed round"] / times["fedavg round"]
            self.results.keep(f"round/{workload}/fafed to fedavg", apart, "")
            self.results.say(f"  fafed/fedavg: {ratio(apart)}")

    def measure_workloads(self):
        """The three fixed workloads against what people write without fedmpi."""
        self.results.say("", "fixed workloads: FedAvg, against loops without fedmpi (without its settings)")
        if self.chosen.quick:
            self.results.say("  --quick: smaller ones of their kind, not held to the targets")
        has_gloo = baselines.join_gloo(self.link)
        rows = []
        for workload, target in TARGETS.items():
            rounds = self._rounds(workload, "--algorithm", "fedavg")
            rivals = [
                Contestant("fedmpi", rounds.run),
                Contestant("floor", rounds.floor),
                *self._baselines(rounds, has_gloo),
            ]
            times = self._contest(rivals)
            for name, one in times.items():
                self.results.keep(f"workload/{workload}/{name}", one)
            against = {name: times["fedmpi"] / times[name] for name in times if name.startswith("loop")}
            for name, one in against.items():
                self.results.keep(f"workload/{workload}/fedmpi to {name}", one, "")
            rows.append([workload, milliseconds(times["fedmpi"]), ratio(times["fedmpi"] / times["floor"])])
            rows[-1] += [ratio(against[n]) if n in against else "-" for n in LOOPS] + [f"{target}"]
            rounds.close()
        titles = ["workload", "round ms", "round/floor", *(f"/{name}" for name in LOOPS), "target /loop, flat"]
        self.results.say(*table(titles, rows))
        if any("-" in row for row in rows):
            self.results.say("  -: PeriodicModelAverager knows one client per rank, on two ranks or more of one node")
        if self.link.oversubscribed:
            self.results.say("  more ranks than cores: the loops' ranks spin while they wait, which makes them slow")

    def _baselines(self, rounds, has_gloo):
        training, run = rounds.training, rounds.config.run
        samples = [training.task.samples[client] for client in training.place.clients]
        data = [one.at(torch.arange(one.num)) for one in samples]

        def loop():
            torch.manual_seed(derive(run.seed, "model"))
            module = training.task.build_model(rounds.config.model_class, rounds.config.model_settings)
            return baselines.Loop(module, data, rounds.num_clients, run.local_steps, run.batch_size)

        loops = [baselines.flat_loop(self.link.comm, loop()), baselines.per_tensor_loop(self.link.comm, loop())]
        if has_gloo and rounds.num_clients == self.link.size:
            loops.append(baselines.model_averager_loop(loop(), run.local_steps))
        return [Contestant(name, run_round, keeps_memory=False) for name, run_round in zip(LOOPS, loops)]

    def measure_settings(self):
        """What each speed setting gains, by switching it off (or on, where it is off)."""
        workload = self.chosen.workload or ("fashion" if self.chosen.quick else "cnn")
        words = ["--algorithm", self.algorithms[-1]]
        as_is = self._rounds(workload, *words)
        others = {
            "without channels_last": ["--channels_last", "false"],
            "without direct gradients": ["--direct_gradients", "false"],
            "plain Allreduce": ["--transport", "allreduce"],
            "bf16 autocast": ["--autocast", "bf16"],
        }
        if self.algorithms[-1] == "fafed":
            others["fused update"] = ["--fused_update", "true"]
        opened, missing = {}, []
        for name, more in others.items():
            try:
                opened[name] = self._rounds(workload, *words, *more)
            except AgreedUserError:  # torch.compile without a compiler
                missing.append(name)
        rivals = [
            Contestant("as it is", as_is.run),
            Contestant("malloc's defaults", as_is.run, keeps_memory=False),
            *(Contestant(name, rounds.run) for name, rounds in opened.items()),
        ]
        if self.link.oversubscribed:
            spinning = self._rounds(workload, *words)
            spinning.link.oversubscribed = False
            opened["ranks wait spinning"] = spinning
            rivals.append(Contestant("ranks wait spinning", spinning.run))
        times = self._contest(rivals)
        rows = []
        for name, one in times.items():
            self.results.keep(f"settings/{workload}/{name}", one)
            rows.append([name, milliseconds(one), ratio(one / times["as it is"])])
        self.results.say("", f"settings: a round of {self.algorithms[-1]} on {workload}")
        self.results.say(*table(["", "round ms", "to as it is"], rows))
        self.results.say(*(f"  {name}: not possible here, or not with --set" for name in missing))
        for rounds in (as_is, *opened.values()):
            rounds.close()

    def measure_scaling(self):
        """Rounds over q, clients and model size; the model fitted to them, and what it projects."""
        workload = self.chosen.workload or "fashion"
        rounds, nbytes = self._scale_rounds(workload)
        alpha, beta = self._scale_link()
        points = [point for point in rounds if point != HELD_OUT]
        local = {point: max(total - exchange, 1e-9) for point, (total, exchange) in rounds.items()}
        model = scaling.Model(*scaling.fit_rounds(points, [local[point] for point in points]), alpha, beta)
        self.results.say("", f"model of a round of {workload}, {self.algorithms[0]}, on this machine:")
        self.results.say(
            f"  {1e3 * model.fixed:.3g} ms + clients per rank * ({1e3 * model.client:.3g} ms + "
            f"q * {1e3 * model.step:.3g} ms) + 2 ceil(log2 N) * {1e6 * alpha:.3g} us + "
            f"2 (N-1)/N * bytes / ({1e-9 / max(beta, 1e-30):.3g} GB/s)"
        )
        for name in ("fixed", "client", "step", "alpha", "beta"):
            self.results.keep(f"scaling/{workload}/{name}", getattr(model, name))
        predicted = model.local(*HELD_OUT) + model.communication(self.link.size, nbytes)
        measured = rounds[HELD_OUT][0]
        self.results.keep(f"scaling/{workload}/predicted to measured", predicted / measured, "")
        self.results.say(
            f"  q = {HELD_OUT[0]}, {HELD_OUT[1]} clients per rank, which it did not see: "
            f"{1e3 * predicted:.3g} ms predicted, {1e3 * measured:.3g} ms measured ({predicted / measured - 1:+.0%})"
        )
        if self.projection:
            self._project(model, workload, nbytes)

    def _scale_rounds(self, workload):
        """({(q, clients per rank): (seconds of a round, of its exchange)}, bytes of an exchange)."""
        points = [*(POINTS[::2] if self.chosen.quick else POINTS), HELD_OUT]
        opened = {}
        for q, clients in points:
            words = ["--algorithm", self.algorithms[0], "--local_steps", q, "--clients", clients * self.link.size]
            opened[q, clients] = self._rounds(workload, *map(str, words))
        rivals = [Contestant(str(point), rounds.run) for point, rounds in opened.items()]
        rivals += [Contestant(f"{point} exchange", rounds.exchange) for point, rounds in opened.items()]
        times = self._contest(rivals, 2 * self.seconds)
        found = {point: (times[str(point)].median, times[f"{point} exchange"].median) for point in points}
        rows = []
        for q, clients in points:
            one = times[str((q, clients))]
            self.results.keep(f"scaling/{workload}/q={q}, {clients} per rank", one)
            per_step = one.median / (q * clients)
            rows.append([q, clients * self.link.size, milliseconds(one), f"{1e3 * per_step:.3g}"])
        self.results.say("", f"scaling: rounds of {self.algorithms[0]} on {workload}")
        self.results.say(*table(["q", "clients", "round ms", "ms per step of a rank"], rows))
        nbytes = opened[points[0]].nbytes
        for rounds in opened.values():
            rounds.close()
        return found, nbytes

    def _scale_link(self):
        """(alpha, beta) fitted to exchanges of models of many sizes."""
        rows, sizes, seconds = [], [], []
        for hidden in HIDDEN[:3] if self.chosen.quick else HIDDEN:
            words = f"--task {HERE}.RandomImages --task.samples 64 --model mlp --model.hidden {hidden}"
            words += f" --local_steps 1 --batch_size 8 --algorithm {self.algorithms[0]}"
            rounds = Rounds(self.link, words.split())
            rivals = [Contestant("round", rounds.run), Contestant("exchange", rounds.exchange)]
            times = self._contest(rivals, self.seconds / 3)
            self.results.keep(f"scaling/parameters={rounds.dim}/round", times["round"])
            self.results.keep(f"scaling/parameters={rounds.dim}/exchange", times["exchange"])
            share = times["exchange"] / times["round"]
            rows.append([f"{rounds.dim:,}", *(milliseconds(one) for one in times.values())])
            rows[-1] += [ratio(share), rate(rounds.nbytes, times["exchange"].median), rounds.link.used]
            sizes.append(rounds.nbytes)
            seconds.append(times["exchange"].median)
            rounds.close()
        self.results.say("", "scaling: an MLP with one hidden layer, q = 1, batch 8")
        titles = ["parameters", "round ms", "exchange ms", "exchange/round", "GB/s", "by"]
        self.results.say(*table(titles, rows))
        return scaling.fit_link(self.link.size, sizes, seconds)

    def _project(self, model, workload, nbytes):
        rounds = self._rounds(workload, "--algorithm", self.algorithms[0])
        q, dim = self.projection.q or rounds.local_steps, self.projection.parameters or rounds.dim
        local, communication = scaling.project(model, self.projection, rounds.local_steps, rounds.dim, nbytes)
        rounds.close()
        total = local + communication
        steps = self.projection.N * q / total
        self.results.keep(f"scaling/{workload}/projected {self.chosen.project}", total)
        self.results.say(
            f"  projected to {self.chosen.project}: {1e3 * total:.3g} ms a round of q = {q}, {dim:,} parameters "
            f"({1e3 * local:.3g} local, {1e3 * communication:.3g} communication), {steps:.3g} client-steps/s"
        )

    def measure_directions(self):
        """A two-point gradient, its directions at once and in other ways."""
        directions.measure(self._rounds, self._contest, self.results, self.chosen.workload or "fashion")


LOOPS = ("loop, flat", "loop, per tensor", "loop, PeriodicModelAverager")


def _update_share(row):
    split = row["split"]
    local = split["gradient"] + split["update"] + split["data"]
    return split["update"] / local if local else np.nan
