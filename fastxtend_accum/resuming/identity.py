"""Whether a fit is the one that was saved"""
from __future__ import annotations
from fastai.basics import *

from ..windows.processes import n_processes
from .graph import Graph,is_of_data
from .parts import generators,is_of_package

def settings_of(learn)->dict:
    "Returns what is not among the parts that a fit leaves as they are, by names like those of parts"
    res = {('processes',''):str(n_processes(learn))}
    scheduled = nested_attr(learn, 'param_scheduler.scheds', {})
    for i,hypers in enumerate(learn.opt.hypers):
        for name in hypers.keys()-scheduled: res[name,f'of group {i}'] = str(hypers[name])
    return res

def text_of(part:tuple)->str:
    "Returns a part as users write it"
    return '.'.join(part).strip('.').removesuffix('.items')

def is_of_hooks(part:tuple)->bool:
    "Returns whether a part is a dict of hooks, whose keys are other ones in each process"
    return 'hooks' in part[1]

def differences(graph:Graph, begun:dict, digests:dict)->dict:
    "Returns how parts differ from those when the fit began that was saved, but for parts that it has changed"
    res = {}
    for part,then in begun.items():
        path,name = part
        now = graph.begun.get(part)
        is_from_seed = not name and isinstance(graph.objects.get(path), (Tensor,*generators))
        has_changed = digests.get(part, then) != then
        if now == then or is_from_seed or has_changed or is_of_hooks(part): continue
        res[part] = text_of(part)
        if isinstance(then, str): res[part] += f' {now}, not {then}'
    return res

def may_differ(graph:Graph, part:tuple)->bool:
    "Returns whether a part is a number or a text of a callback, and not of one that sets windows"
    o = graph.objects.get(part[0])
    return isinstance(o, Callback) and not is_of_package(o) and isinstance(graph.begun.get(part), str)

def n_workers(dl)->int:
    return getattr(getattr(dl, 'fake_l', dl), 'num_workers', 0)

def draws_numbers(graph:Graph, dl)->bool:
    "Returns whether the first sample takes random numbers, which are others if other workers load it"
    before = graph.state(is_of_data)
    make_item = getattr(dl, 'do_item', dl.dataset.__getitem__)
    make_item(0)
    after = graph.state(is_of_data)
    graph.restore(before['rest'])
    return before['digests'] != after['digests']
