"""Causal attention: a scan over chunks of tokens, in segments that run side by side.

A program walks through one segment of one key head. It carries the moments of all keys before its chunk (`past`),
answers the chunk's queries from them and from explicit weights of the chunk's own keys (`answers`), and takes the chunk
in. Where a sequence has several segments, they are first summed up on their own, and merged from first to last
(`segments`): the bits of a sequence do not depend on what else is in the batch.

Keys and values are told from the means before the chunk: what is rounded and summed is small, nothing of the future is
in it, and the scores of all keys before the chunk sum to nothing. The first chunk is computed without rounding: there a
few keys share all the weight, and so would their errors.

Backwards there are two scans. The first, forwards, is for queries (`queries`) and needs the past, as the answers did;
it leaves a few numbers of every row that the second one wants (`rows`). The second, backwards, is for keys and values
(`keys`) and needs the future (`future`): sums over all later queries, in which keys and values are told from references
that all of a sequence shares, so that little is lost when they are rounded. Where a sequence has several segments,
those sums are first taken segment by segment, and added from last to first. All of it is linear in the gradient of the
answers. Where a state is too wide for one program its blocks of values come one after the other, each adding to what
the ones before left.

A later token does not reach an earlier row, whatever it holds. Weights of zero do not undo NaN, so where the moments of
a segment came out wild its rows before the first wild token are answered again, as if the segment ended there. Nothing
of the future is in the references either. Backwards, rows that see a wild token get NaN, and rows of a segment past the
last one with a gradient are left out if one of them is wild: a gradient of zero goes back as zero.
"""

from .launches import backward, forward

__all__ = ["backward", "forward"]
