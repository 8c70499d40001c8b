import torch
import torch.distributed as dist

import deltaspan as ds

dist.init_process_group()  # gloo between CPUs, NCCL between GPUs
if torch.cuda.is_available():
    torch.cuda.set_device(dist.get_node_local_rank())

cu_seqlens = [0, 700, 1900, 2048]  # three documents, packed end to end
part = ds.partition(cu_seqlens, dist.get_world_size(), layout="zigzag_per_document")
ctx = ds.build_context(part, dist.group.WORLD)  # once per batch, for every layer

torch.manual_seed(0)  # the same weights and the same whole pack on every rank
layer = ds.nn.GatedDeltaNet(hidden_size=128, num_heads=2, num_v_heads=4, head_dim=32).to(ctx.device)
x, target = torch.randn(2, 1, cu_seqlens[-1], 128).to(ctx.device)

y = layer(ctx.shard(x), ctx)
loss = (y - ctx.shard(target)).square().sum() / cu_seqlens[-1]  # by the tokens of the whole pack, not of this rank
loss.backward()
for partial in (loss.detach(), *(parameter.grad for parameter in layer.parameters())):
    dist.all_reduce(partial)  # each rank holds a part of the sum
if ctx.rank == 0:
    print(f"{dist.get_world_size()} ranks: loss {loss:.6f}, gradient {layer.v_proj.weight.grad.norm():.6f}")
dist.destroy_process_group()
