"""The transfer space in its two stored forms, and the silent start of an injection.

*Codes* are a table `[V, R]`; a *basis* (mean, directions, eigenvalues) makes them from the LM head's rows.
Eigenvectors have no fixed sign, and close ones no fixed direction, so `eigh` alone does not find the basis behind a
stored table. Turned to the table's signs it mostly does. Otherwise what maps rows to codes is a linear least-squares
problem with far more rows than unknowns, in which rounding of the codes averages out. Either result is tried: it must
give the table back.
"""

import hashlib

import torch
from torch.nn import functional as F

from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.conversion.writing import Item, made
from dspine_hub.errors import DSpineHubError
from dspine_hub.modeling_dspine import transfer_basis, transfer_codes

ROWS = 16384
BASIS = ("mean", "directions", "eigenvalues")
# a second fit starts from better lengths of rows
FITS = 2
# one step of bfloat16 has 2**-7 of the value at most; float32 noise of the sums matters near zero only
RELATIVE, ABSOLUTE = 2.0**-7, 2.0**-9


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Hash a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def basis_sha256(basis: tuple[torch.Tensor, ...]) -> str:
    """Hash mean, directions and eigenvalues, in this order, float32."""
    return tensor_sha256(torch.cat([part.float().reshape(-1) for part in basis]))


def fit_basis(head: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the basis that makes a stored code table from the head it was made of.

    Args:
        head (`torch.Tensor` of shape `[V, H]`): LM-head rows.
        codes (`torch.Tensor` of shape `[V, R]`): Stored codes.

    Returns:
        `tuple` of mean (`[H]`), directions (`[R, H]`, unit rows) and eigenvalues (`[R]`), float32.

    Raises:
        DSpineHubError: When no basis makes these codes within rounding: they were made of another head.
    """
    try:
        mean, directions, eigenvalues = transfer_basis(head, codes.shape[1])
    except ValueError as error:
        raise DSpineHubError(f"the target's LM head cannot carry these codes: {error}") from None
    signed = (mean, _signed(head, codes, mean, directions, eigenvalues), eigenvalues)
    fitted = _fitted(head, codes, *signed)
    best = max((signed, fitted), key=lambda basis: int((transfer_codes(head, *basis) == codes).sum()))
    wrong = count_differences(transfer_codes(head, *best), codes)
    if wrong:
        raise DSpineHubError(
            f"`transfer_codes` must follow from the target's LM head to be stored as a basis, got {wrong} of "
            f"{codes.numel()} values that differ by more than rounding: the codes were made of another head. Keep "
            "them as a table."
        )
    return best


def _signed(head, codes, mean, directions, eigenvalues) -> torch.Tensor:
    """Turn every direction to the sign it has in the table."""
    agreement = (transfer_codes(head, mean, directions, eigenvalues).float() * codes.float()).sum(dim=0)
    return directions * torch.where(agreement < 0, -1.0, 1.0)[:, None]


def _fitted(head, codes, mean, directions, eigenvalues) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve for the basis by least squares, starting from another's lengths of rows."""
    inverse, whiten = _inverse_scatter(head, mean), (directions / eigenvalues.sqrt()[:, None]).T
    for _ in range(FITS):
        whiten = _fit_once(head, mean, codes, whiten, inverse)
    return mean, F.normalize(whiten, dim=0).T.contiguous(), whiten.norm(dim=0) ** -2


def _inverse_scatter(head: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    scatter = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64)
    for rows in head.split(ROWS):
        centred = F.normalize(rows.float(), dim=-1) - mean
        scatter += (centred.T @ centred).double()
    return torch.linalg.pinv(scatter, hermitian=True, rtol=1e-7)


def _fit_once(head, mean, codes, whiten, inverse) -> torch.Tensor:
    """Solve for the map `[H, R]` whose images point along the codes and are as long as `whiten` makes them."""
    product = torch.zeros(head.shape[1], codes.shape[1], dtype=torch.float64)
    for rows, wanted in zip(head.split(ROWS), codes.split(ROWS), strict=True):
        centred = F.normalize(rows.float(), dim=-1) - mean
        lengths = (centred @ whiten).norm(dim=-1, keepdim=True)
        product += (centred.T @ (lengths * wanted.float())).double()
    return (inverse @ product).float()


def count_differences(codes: torch.Tensor, expected: torch.Tensor) -> int:
    """Count values that differ by more than bfloat16 rounding."""
    scale = ABSOLUTE / codes.shape[1] ** 0.5
    total = 0
    for mine, theirs in zip(codes.split(ROWS), expected.split(ROWS), strict=True):
        theirs = theirs.float()
        total += int(((mine.float() - theirs).abs() > RELATIVE * theirs.abs() + scale).sum())
    return total


def compact(head: torch.Tensor, codes: torch.Tensor) -> tuple[list[Item], dict]:
    """Replace a code table by its basis.

    Returns:
        `tuple[list[Item], dict]`: The tensors to store, and the checksums to record.
    """
    codes = codes.to(torch.bfloat16)
    basis = fit_basis(head, codes)
    items = [made(f"transfer_basis.{name}", part, "F32") for name, part in zip(BASIS, basis, strict=True)]
    rebuilt = transfer_codes(head, *basis)
    checksums = {
        "basis": basis_sha256(basis),
        "codes": tensor_sha256(rebuilt),
        "stored_codes": tensor_sha256(codes),
    }
    return items, checksums


def expand(head: torch.Tensor, basis: tuple[torch.Tensor, ...], checksums: dict) -> tuple[list[Item], list[str]]:
    """Make the code table a basis stands for.

    Returns:
        `tuple[list[Item], list[str]]`: The tensor to store, and notes.

    Raises:
        DSpineHubError: When the basis is not the recorded one.
    """
    found = basis_sha256(basis)
    if checksums and found != checksums.get("basis"):
        raise DSpineHubError(
            f"`transfer_basis` must have the recorded sha256 {checksums.get('basis', '')[:12]}, got {found[:12]}: the "
            "file was changed after it was made."
        )
    codes = transfer_codes(head, *basis)
    notes = []
    if checksums and tensor_sha256(codes) != checksums.get("codes"):
        notes.append("the codes differ from the recorded ones in rounding: another machine sums in another order")
    return [made("transfer_codes", codes)], notes


def silent_start(config: DSpineConfig, head: torch.Tensor) -> list[Item]:
    """Make the injection of a backbone that never had one: it writes nothing until it is trained.

    Nothing is random: readouts start at the transfer directions, writes and predecessor gate at zero as in the method,
    the receiver gate at zero (half open), and the message passes on the strongest coordinates, one each.
    """
    try:
        mean, directions, eigenvalues = transfer_basis(head, config.transfer_rank)
    except ValueError as error:
        raise DSpineHubError(str(error)) from None
    rank, size, hidden = config.transfer_rank, config.message_size, config.hidden_size
    message = torch.zeros(size, rank)
    # eigenvalues ascend: the last coordinate is the strongest
    message[torch.arange(size), rank - 1 - torch.arange(size) % rank] = 1
    items = [
        made("injection.message.weight", message, "BF16"),
        made("injection.receiver_gate.weight", torch.zeros(size, rank), "BF16"),
        made("injection.predecessor_gate.weight", torch.zeros(size, rank), "BF16"),
        made("injection.bias", torch.zeros(size), "BF16"),
        made("transfer_codes", transfer_codes(head, mean, directions, eigenvalues)),
        made("transfer_ready", torch.tensor(True)),
    ]
    for layer in range(config.num_hidden_layers):
        items.append(made(f"injection.readouts.{layer}.weight", directions, "BF16"))
        items.append(made(f"injection.writes.{layer}.weight", torch.zeros(hidden, size), "BF16"))
    return items
