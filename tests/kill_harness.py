"""Kills a script by SIGKILL or SIGTERM, starts it again until it ends, and compares it with one that nobody has killed:
without any tolerance. It knows nothing of how a fit goes on, but the name of the callback and of its files."""
import signal
import sys
import traceback
from typing import NamedTuple

from common import *

LIMIT = 120  # seconds that one start of a script may take
MOST_KILLS_OF_TRIAL = 4  # before the script may run to its end
FILES = 'models/resume/*.pth'  # of AutoResume


# What a script shows

class Spy(Callback):
    "Notes what a callback can see, in a list that is in no file"
    order = 200
    trace = []
    begun = None  # the state when the last fit began

    def note(self, event, *more):
        learn = self.learn
        if learn.lock.locked() or hasattr(learn, 'lr_finder'): return
        self.trace.append((event, learn.epoch, learn.train_iter, learn.pct_train, *more))

    def before_fit(self): Spy.begun = state_of(self.learn)
    def before_epoch(self): self.note('before_epoch')
    def before_train(self): self.note('before_train')

    def after_batch(self):
        learn = self.learn
        if learn.training and not learn.lock.locked():
            note_place(learn)
            note_trained(learn)
        hypers = [sorted(o.items()) for o in learn.opt.hypers] if learn.opt else None
        inputs = [o.double().sum().item() for o in learn.xb]
        self.note('batch', learn.iter, learn.n_iter, str(hypers), inputs)

    def after_train(self): self.note('after_train')
    def after_validate(self): self.note('after_validate')
    def after_epoch(self): self.note('after_epoch')
    def after_fit(self): self.note('after_fit')


def note_place(learn):
    "The first batch of a process leaves its number in the epoch in a file, since the process may be killed"
    place = Path('first_batch.txt')
    if not place.exists() and not hasattr(learn, 'lr_finder'): place.write_text(str(learn.iter))


def note_trained(learn):
    "Adds a character to a file for each batch that is trained, by all processes"
    if hasattr(learn, 'lr_finder'): return
    with open('trained.txt', 'a') as f: f.write('.')


def n_trained(folder): return (folder/'trained.txt').stat().st_size


def generators_now():
    return [random.getstate(), np.random.get_state()[1], torch.get_rng_state()]


def orders_of(learn):
    "Returns the generators of the DataLoaders"
    return [dl.rng.getstate() for dl in learn.dls.loaders if hasattr(dl, 'rng')]


def state_of(learn):
    "Returns texts of the weights and of the generators"
    return exact([*learn.model.parameters()]), exact([generators_now(), orders_of(learn)])


def has_moved(learn):
    "Returns whether the last fit has changed weights and drawn random numbers: otherwise equal ends prove little"
    return all(before != now for before, now in zip(Spy.begun, state_of(learn)))


def history():
    "Returns the lines of CSVLogger's file, without the time of each epoch"
    path = Path('history.csv')
    if not path.exists(): return None
    return [line.rpartition(',')[0] for line in path.read_text().splitlines()]


def files():
    "Returns what the script has saved by itself"
    return {o.name: torch.load(o, weights_only=False) for o in sorted(Path().glob('models/*.pth'))}


def results_of(learn):
    recorder, opt = learn.recorder, learn.opt
    return dict(
        weights=learn.model.state_dict(),
        opt=opt.state_dict(),
        losses=recorder.losses,
        rates=recorder.lrs,
        iters=recorder.iters,
        values=[list(o) for o in recorder.values],
        sizes=getattr(recorder, 'accum_bs', None),
        hypers=getattr(recorder, 'hps', None),
        best=[getattr(o, 'best', None) for o in learn.cbs],
        frozen_idx=opt.frozen_idx,
        has_grad=[p.grad is not None for p in learn.model.parameters()],
        train_iter=learn.train_iter,
        generators=generators_now(),
        orders=orders_of(learn),
        history=history(),
        files=files())


# Kills: most of them while batches are trained, since a kill between two epochs proves little

class Countdown:
    "Sends a signal to this process at the `n`th call, if there is one"
    def __init__(self, n, number=signal.SIGKILL):
        self.n = n
        self.number = number
        self.count = 0

    def __call__(self):
        self.count += 1
        if self.count == self.n: os.kill(os.getpid(), self.number)


BATCH_EVENTS = 'batch', 'pred', 'loss', 'backward', 'step'


def trains_batch(cb, event):
    "Returns whether this is an event of a batch that is trained in a fit"
    learn = cb.learn
    if not event.endswith(BATCH_EVENTS) or learn is None: return False
    is_other = learn.lock.locked() or hasattr(learn, 'lr_finder')
    return learn.training and not is_other


def count_events(countdown):
    original = Callback.__call__

    def call(self, event):
        if trains_batch(self, event): countdown()
        return original(self, event)
    Callback.__call__ = call


def count_steps_of_saves(countdown):
    "Before and after what ends a save: a file that is whole, but has another name, and one that has its own"
    for name in ('fsync', 'replace'): setattr(os, name, counted(getattr(os, name), countdown))


def counted(f, countdown):
    def call(*args, **kwargs):
        countdown()
        res = f(*args, **kwargs)
        countdown()
        return res
    return call


def kill_at(event=0, step_of_save=0, number=signal.SIGKILL):
    "For a process: kills it at this event of a batch, or at this step of its saves; returns what counts them"
    events = Countdown(event, number)
    steps = Countdown(step_of_save)
    count_events(events)
    count_steps_of_saves(steps)
    return events, steps


# A process

class Run(NamedTuple):
    "How one start of a script ended"
    code: int  # below 0: the signal that has killed it
    first_batch: int|None  # the number in its epoch of the first batch that was trained; None if there was none
    seconds: float  # since then


def script_process(script, seed, prepare):
    "Runs in a process of its own, in the present folder"
    os.setpgid(0, 0)
    sys.stdout = open('out.txt', 'a')
    sys.stderr = open('err.txt', 'a')
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    countdowns = prepare()
    defaults.callbacks.append(Spy)
    set_seed(seed)
    learn = script()
    counts = [o.count for o in countdowns]
    found = dict(results=results_of(learn), trace=Spy.trace, counts=counts, has_moved=has_moved(learn))
    torch.save(found, 'result.tmp')
    os.rename('result.tmp', 'result.pt')


def start(script, folder, seed, prepare=kill_at, seconds=None):
    """Runs `script` in a copy of this process, which has imported fastai; kills it some `seconds` after its first
    batch"""
    place = folder/'first_batch.txt'
    place.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        try:
            os.chdir(folder)
            script_process(script, seed, prepare)
            os._exit(0)
        except BaseException:
            Path('error.txt').write_text(traceback.format_exc())
            os._exit(1)
    code, trained = wait(pid, place, seconds)
    first_batch = int(place.read_text() or 0) if place.exists() else None
    return Run(code, first_batch, trained)


def wait(pid, place, seconds):
    """Returns the exit code, and the seconds since the file `place` was there, once the process has ended; kills
    what it leaves, such as workers"""
    begin = time.monotonic()
    end = begin+LIMIT
    first = None
    ended = 0
    while not ended:
        now = time.monotonic()
        if first is None and place.exists():
            first = now
            if seconds is not None: end = now+seconds
        if now > end: os.kill(pid, signal.SIGKILL)
        time.sleep(.001)
        ended, status = os.waitpid(pid, os.WNOHANG)
    try: os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError: pass
    if first is None: first = begin
    return os.waitstatus_to_exitcode(status), time.monotonic()-first


# Comparing

def exact(o):
    "Returns a text that is the same if all values are, of whatever type"
    torch.set_printoptions(precision=25, threshold=math.inf)
    np.set_printoptions(threshold=sys.maxsize)
    return repr(o)


def named_differences(a, b):
    "Returns the names of the parts in which `a` and `b` are not equal; a NaN equals a NaN"
    return [name for name in a if exact(a[name]) != exact(b[name])]


def trace_differences(whole, resumed):
    """What callbacks saw in the last process is the end of what they see in a whole fit: nothing before it, but ends of
    fits that had ended, and the beginning of one epoch, in which the state came back"""
    events = [o[0] for o in resumed]
    n_before = 0
    while events[n_before:n_before+1] == ['after_fit']: n_before += 1
    for name in ('before_epoch', 'before_train'):
        if events[n_before:n_before+1] == [name]: n_before += 1
    tail = resumed[n_before:]
    expected = whole[len(whole)-len(tail):]
    return [] if exact(expected) == exact(tail) else [f'trace of {len(tail)} events']


# Trials

class Report:
    "What came of a layout"
    def __init__(self, name):
        self.name = name
        self.kills = 0
        self.resumes = 0  # processes that found a file, and trained a batch
        self.in_mid_epoch = 0  # of them, those whose first batch was not the first one of an epoch
        self.lost = 0  # batches that were trained again after SIGTERM
        self.differences = []

    def note(self, run, had_file):
        if run.code < 0: self.kills += 1
        if not had_file or run.first_batch is None: return
        self.resumes += 1
        if run.first_batch > 0: self.in_mid_epoch += 1

    def __str__(self):
        found = self.differences[:4] or 'no difference'
        resumes = f'{self.in_mid_epoch} of {self.resumes} resumes in mid-epoch'
        return f'{self.name}: {self.kills} kills, {resumes}, {self.lost} batches lost by SIGTERM, {found}'


def has_file(folder):
    return any(folder.glob(FILES))


class Whole:
    "A script that nobody kills"
    def __init__(self, script, folder):
        folder.mkdir()
        run = start(script, folder, 1)
        assert run.code == 0, (folder/'error.txt').read_text()
        found = torch.load(folder/'result.pt', weights_only=False)
        assert found['has_moved']
        self.results = found['results']
        self.trace = found['trace']
        self.seconds = run.seconds
        self.n_trained = n_trained(folder)
        self.n_events, self.n_steps_of_saves = found['counts']

    def differences_in(self, folder):
        "Returns what differs in the files of another folder"
        found = torch.load(folder/'result.pt', weights_only=False)
        return named_differences(self.results, found['results'])+trace_differences(self.trace, found['trace'])


def random_kill(rnd, whole, number):
    """Returns arguments of `start` for a kill at an event of a batch, at a time in training, or within a save. The
    events and times of the script's first tenth are left out, since what goes on from its first save proves little"""
    event = rnd.randint(whole.n_events//10, whole.n_events)
    if number == signal.SIGTERM: return dict(prepare=partial(kill_at, event, 0, number))
    kind = rnd.choice(['event', 'event', 'time', 'save'])
    if kind == 'time': return dict(seconds=rnd.uniform(.1, 1)*whole.seconds)
    if kind == 'save': return dict(prepare=partial(kill_at, 0, rnd.randint(1, whole.n_steps_of_saves)))
    return dict(prepare=partial(kill_at, event))


def trial(script, whole, folder, rnd, report):
    "Kills a script up to a few times, lets it end, and compares"
    folder.mkdir()
    number = rnd.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    kills = [random_kill(rnd, whole, number) for _ in range(MOST_KILLS_OF_TRIAL)]
    for attempt, kill in enumerate([*kills, {}]):
        had_file = has_file(folder)
        seed = 1000+attempt if had_file else 1  # nothing may hang on the seed of a script that goes on
        run = start(script, folder, seed, **kill)
        report.note(run, had_file)
        if run.code >= 0: break
    if number == signal.SIGTERM: report.lost += n_trained(folder)-whole.n_trained
    if run.code: report.differences.append((folder/'error.txt').read_text())
    else: report.differences += whole.differences_in(folder)


def kill_layout(name, script, folder, n_kills, seed=0):
    "Tries until there are `n_kills`; returns a report"
    rnd = random.Random(f'{name} {seed}')
    whole = Whole(script, folder/'whole')
    report = Report(name)
    for i in range(3*n_kills):
        if report.differences or report.kills >= n_kills: break
        trial(script, whole, folder/f'trial-{i}', rnd, report)
    return report
