"""Search in the tokens, findings and metadata of stored trajectories: what is asked, how it is found, part by part."""

from rollouts.jobs.search.patterns import PatternTooSlow
from rollouts.jobs.search.search_question import BY, SearchQuestion
from rollouts.jobs.search.trajectory_search import ONLY_IDS, FoundRange, SearchedPart, SearchHit, find_in_row, search
