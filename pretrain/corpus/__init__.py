"""Preparation: text in any of `formats` -> a set of tokens. `prepare` is the way in."""

from pretrain.corpus.folder import PartsMissing as PartsMissing
from pretrain.corpus.hub import DatasetName as DatasetName
from pretrain.corpus.manifest import Settings as Settings
from pretrain.corpus.manifest import summary as summary
from pretrain.corpus.preparation import merge as merge
from pretrain.corpus.preparation import prepare as prepare
from pretrain.corpus.sources import CorpusError as CorpusError
