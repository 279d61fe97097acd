import asyncio, time, functools
from smetric.config.settings import TokenizerSettings, Forward
from tests.faults.harness import running
from tests.faults.stall import Stall
from tests.fakes import FakeEngine
import pytest, random
from smetric.reading import reader, prompt
from smetric.sources import prefix_index, prefix_tokens, holdings
from smetric import block_keys, router as R
from smetric.tokenize import id_list, request_tokens
def timed(owner, name):
    f=getattr(owner,name)
    @functools.wraps(f)
    def g(*a,**k):
        t=time.process_time(); r=f(*a,**k); d=time.process_time()-t
        if d>0.004: print("   ", owner.__name__, name, round(1000*d,1))
        return r
    setattr(owner,name,g)
async def test_x():
    body=b'{"model":"tiny","prompt":['+b",".join(b"%d"%random.randrange(150000) for _ in range(1_150_000))+b"]}"
    from smetric.proxy import endpoints, permit
    for o,n in ((reader,"screen"),(reader,"members"),(reader,"read_prompts"),(block_keys.BlockKeys,"upto"),(block_keys.BlockKeys,"__init__"),(holdings.Holdings,"enter"),(prefix_index.PrefixIndex,"lookup"),(prefix_index.PrefixIndex,"prefilled"),(R.Router,"decide") if hasattr(R.Router,"decide") else (reader,"parse")):
        timed(o,n)
    for n in dir(prompt.Prompt):
        f=getattr(prompt.Prompt,n)
        if callable(f) and not n.startswith("__"): timed(prompt.Prompt,n)
    for n in dir(prefix_tokens.PrefixTokens) if hasattr(prefix_tokens,"PrefixTokens") else []:
        f=getattr(prefix_tokens.PrefixTokens,n)
        if callable(f) and not n.startswith("__") and not asyncio.iscoroutinefunction(f): timed(prefix_tokens.PrefixTokens,n)
    async with running(FakeEngine(), FakeEngine(), policy="smetric", tokenizer=TokenizerSettings(source="engine"), check_after=False) as router:
        for _ in range(2):
            with Stall() as stall:
                a=await router.ask("POST","/v1/completions",body)
            print(a.status, "STALL", stall.seconds)
        print([l for l in (await router.admin("/metrics")).body.decode().splitlines() if "tokeniz" in l and not l.startswith("#")][:8])
