"""The deterministic heart: what is cached where, who runs next, and what follows from an answer. No tensors, no I/O, no
time.

To be read in this order; each file needs those before it, and few behind it:

1. what is held: `block` (the pool), `offload` (what the host keeps of it), `table` (copy-on-write tables, and the
   copies that follow), `history` (accepted tokens as a trie), `cache_events` (what can be found, for who listens)
2. what is said: `sampler`, `draft`, `protocol` (queries, answers, verdicts, decoders), `archive` (what requests leave
   to later ones), `acceptance` (what became of drafts), `stopping` and `stop_strings`, `constraint`, `cutting` (what
   stands of drawn tokens), `logits_rules`, `logprobs`
3. who runs: `request` (branches and requests), `parked` (branches between two requests), `limits` (what may be used,
   what is refused at the door), `adapter_places` (which adapters are at hand), `resuming` (requests that were
   interrupted elsewhere)
4. what a device sees: `forward` (a step as arrays), `wire` (as one buffer), `masking` (what follows it), `plan` (for
   whom), `layout`, `rolling`, `marks` (how the arrays are made), `ranking` (those of a gang's best), `reading` (what
   comes back)
5. what pays: `costs` (of a step), `odds` (of drafts), `granting` (whose rows), `standing` (who is asked), `weighing`
6. a step is planned: `planning`, by `proposing` (decoders), `rows`, `pausing` (prompts beside answers), `overtaking`
   (beside one another), `drafting`, `reuse` and `trunk` (the prefix cache), `demand` (who is let in), `preemption`;
   `ahead` (before the answers of the one before)
7. a step is carried in: `cached` (what tables hold then), `check_values` and `checks` (what decoders say), `children`
   (a gang's generation as arrays), `settling`, `common` (what a gang shares), `conclusion` (how requests end),
   `transition` (the only code that changes tables)
8. `scheduler`: all of it together
"""
