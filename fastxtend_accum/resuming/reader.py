"""Reads the training DataLoader from the place where a fit was saved"""
from __future__ import annotations
from fastai.basics import *

from .graph import Graph,is_of_data

def stateful(dl):
    """Returns what knows its place in the data, as a `StatefulDataLoader` and the streams of Hugging Face do; None if
    nothing does"""
    if isinstance(dl, DataLoader):
        return None
    dataset = None if dl.num_workers else dl.dataset  # workers have a copy
    return first(o for o in (dl, dataset) if hasattr(o, 'load_state_dict'))

class Reader:
    """Reads an epoch's DataLoader from the beginning or, in a fit that goes on, from the first batch that has not been
    loaded: repeats the start of the epoch from its original state, and drops the batches that have been"""
    def __init__(self, graph:Graph, n_loaded:int, at_start:Tensor|None=None, place=None, has_ended=False):
        self.graph = graph
        self.n_loaded = n_loaded
        self.at_start = at_start  # of the data when the DataLoader began
        self.place = place  # of what knows it by itself
        self.has_ended = has_ended
        self.stateful = None

    def state(self)->tuple:
        place = self.place if self.stateful is None else self.stateful.state_dict()
        return self.at_start,place,self.has_ended

    def __call__(self, dl)->Iterator:
        "Takes the place of `iter`"
        if self.has_ended: return  # a DataLoader may draw a random number at its end, too
        now = self.graph.state(is_of_data)['rest']
        if self.n_loaded: yield from self.rest_of(dl, now)
        else:
            self.at_start = now
            self.stateful = stateful(dl)
            yield from dl
        self.has_ended = True

    def rest_of(self, dl, now:Tensor)->Iterator:
        self.graph.restore(self.at_start)
        self.stateful = stateful(dl)
        if self.stateful is not None: self.stateful.load_state_dict(self.place)
        batches = iter(dl)
        n_to_drop = self.n_loaded if self.stateful is None else 0
        for _ in range(n_to_drop): next(batches, None)
        self.graph.restore(now)
        return batches
