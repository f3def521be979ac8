"""SIGTERM and Ctrl-C wait until a fit has been saved"""
from __future__ import annotations
import signal,threading

from fastai.basics import *

class HeldSignals:
    "Holds signals back while fits run"
    def __init__(self):
        self.handlers = {}  # that were there before, by signal
        self.n_fits = 0  # that run, within each other
        self.received = None

    def begin(self):
        self.n_fits += 1
        if self.n_fits == 1: self.hold()

    def hold(self):
        if threading.current_thread() is not threading.main_thread(): return
        for number in (signal.SIGINT,signal.SIGTERM):
            self.handlers[number] = signal.signal(number, self.receive) or signal.SIG_DFL

    def receive(self, number, frame):
        is_second = self.received is not None  # somebody does not want to wait
        self.received = number
        if is_second: self.let_through()

    def let_through(self):
        "Lets a signal that was received do its work, which may end the process"
        for number,handler in self.handlers.items(): signal.signal(number, handler)
        number = self.received
        self.received = None
        if number is not None: signal.raise_signal(number)

    def end(self):
        self.n_fits -= 1
        if not self.n_fits: self.let_through()

held_signals = HeldSignals()
