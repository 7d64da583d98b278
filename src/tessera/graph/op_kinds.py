"""Which family an operator belongs to, by its name in torch: the family decides how it is costed."""

from __future__ import annotations

from collections.abc import Mapping

# A "view" launches no kernel; "gemm", "conv", "attention" and "rnn" do matrix work. A name is its in-place form too.
_FAMILIES: Mapping[str, str] = {
    "gemm": """
        mm addmm bmm baddbmm addbmm matmul linear dot mv addmv vdot outer ger addr _scaled_mm _int_mm _grouped_mm
        _scaled_grouped_mm einsum tensordot _addmm_activation _weight_int8pack_mm _weight_int4pack_mm tiled_mm
        lowprec_mm bounded_mm""",
    "conv": """
        convolution _convolution convolution_overrideable cudnn_convolution convolution_backward _slow_conv2d_forward
        conv2d conv1d conv3d conv_transpose2d cudnn_convolution_transpose""",
    "attention": "sdpa sdpa_backward scaled_dot_product_attention",
    "rnn": "rnn rnn_backward _cudnn_rnn _cudnn_rnn_backward",
    "copy": """
        clone _to_copy contiguous cat stack copy roll flip repeat repeat_interleave constant_pad_nd pad
        reflection_pad2d replication_pad2d tril triu rot90 slice_scatter select_scatter slice_backward
        select_backward channel_shuffle pixel_shuffle pixel_unshuffle im2col col2im unfold_backward view_copy
        reflection_pad1d reflection_pad2d_backward native_channel_shuffle expand_copy permute_copy diagonal_copy
        as_strided_scatter new_tensor block_diag tile hstack vstack""",
    "reduce": """
        sum mean amax amin max min prod norm linalg_vector_norm var var_mean std std_mean argmax argmin all any
        logsumexp count_nonzero nansum aminmax bincount median nanmedian trace cross_entropy_loss
        binary_cross_entropy mse_loss nll_loss_forward nll_loss2d_forward l1_loss smooth_l1_loss huber_loss kl_div
        histc equal isin dist binary_cross_entropy_with_logits""",
    "softmax": """
        _softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data softmax log_softmax""",
    "norm": """
        native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
        _fused_rms_norm_backward rms_norm rms_norm_backward layer_norm instance_norm weight_norm
        _weight_norm_interface""",
    "batch_norm": """
        native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
        native_batch_norm_backward cudnn_batch_norm_backward batch_norm_with_update batch_norm_backward
        _batch_norm_with_update _batch_norm_no_update _native_batch_norm_legit_functional""",
    "pool": """
        max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward max_pool3d_with_indices
        avg_pool3d avg_pool1d _adaptive_avg_pool3d max_pool2d adaptive_avg_pool2d max_pool1d adaptive_max_pool1d
        avg_pool3d_backward max_pool3d_with_indices_backward _adaptive_avg_pool3d_backward""",
    "resample": """
        upsample_bilinear2d upsample_nearest2d upsample_bicubic2d upsample_bilinear2d_backward
        upsample_nearest2d_backward upsample_bicubic2d_backward grid_sampler_2d grid_sampler_2d_backward
        upsample_linear1d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_nearest1d
        upsample_nearest3d grid_sampler_3d _upsample_nearest_exact2d upsample_linear1d_backward
        upsample_nearest1d_backward""",
    "gather": """
        embedding index gather index_select take take_along_dim _unsafe_index nonzero masked_select embedding_bag
        _embedding_bag searchsorted bucketize""",
    "scatter": """
        embedding_dense_backward index_put _index_put_impl_ scatter scatter_add index_add index_copy index_fill
        scatter_reduce masked_scatter embedding_backward _unsafe_index_put _embedding_bag_dense_backward
        _embedding_bag_backward put_ index_reduce""",
    "sort": """
        sort topk argsort kthvalue cumsum cumprod unique unique2 _unique2 cummax cummin multinomial
        logcumsumexp msort""",
    "random": """
        native_dropout bernoulli rand randn rand_like randn_like uniform_ exponential_ randint randperm normal
        randint_like _fused_dropout random_""",
    "fill": """
        zeros ones full zeros_like ones_like full_like zero_ new_zeros new_ones new_full scalar_tensor arange
        linspace eye fill tril_indices triu_indices""",
    "fft": "_fft_r2c _fft_c2r _fft_c2c",
    "transfer": "_to_device",
    "solve": """
        linalg_inv_ex linalg_solve_ex cholesky linalg_cholesky_ex linalg_qr linalg_svd _linalg_svd linalg_eigh
        _linalg_eigh linalg_lu_factor_ex triangular_solve linalg_solve_triangular inverse _linalg_solve_ex""",
    "view": """
        view _unsafe_view t transpose permute expand reshape squeeze unsqueeze slice select detach alias as_strided
        unbind split split_with_sizes chunk narrow diagonal unfold view_as_real view_as_complex movedim swapaxes
        numpy_T lift_fresh _reshape_alias expand_as unsafe_split unsafe_split_with_sizes unsafe_chunk empty
        empty_like empty_strided new_empty new_empty_strided set_ resize_ requires_grad_ real imag _conj conj
        positive unflatten flatten ravel item is_same_size sym_size sym_stride sym_numel _assert_async _assert_scalar
        _nested_tensor_size stride size dim numel retain_grad is_pinned _has_compatible_shallow_copy_type result_type
        broadcast_tensors atleast_1d _to_dense record_stream resolve_conj resolve_neg _neg_view""",
}

# Operators that torch computes element by element although its tags do not say so.
_ELEMENTWISE_NAMES = """
    leaky_relu_backward _prelu_kernel _prelu_kernel_backward glu glu_backward log_sigmoid_forward log_sigmoid_backward
    hardtanh_backward softplus_backward elu_backward hardswish_backward mish_backward hardsigmoid_backward
    softshrink_backward hardshrink_backward rrelu_with_noise rrelu_with_noise_backward nll_loss_backward
    nll_loss2d_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
    soft_margin_loss soft_margin_loss_backward floor_divide complex polar affine_grid_generator linalg_cross cross
    renorm masked_scatter_backward _amp_update_scale _amp_foreach_non_finite_check_and_unscale hann_window
    hamming_window blackman_window bartlett_window kaiser_window frexp max_unpool2d
    fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask quantize_per_tensor
    dequantize"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())

# Operators of `tessera.op` whose bare names mean something else to torch, or nothing.
_TESSERA_FAMILIES: Mapping[str, str] = {
    "attention": "attention",
    "softmax": "softmax softmax_backward",
    "norm": "norm norm_backward",
    "conv": "tiled_conv2d",
}

_MULTI_TENSOR = ("_foreach_", "_fused_adam", "_fused_adagrad", "_fused_sgd")


def _by_name(families: Mapping[str, str]) -> dict[str, str]:
    return {name: kind for kind, names in families.items() for name in names.split()}


KINDS = _by_name(_FAMILIES)
"""Family by short name of torch's operators."""
_TESSERA_KINDS = _by_name(_TESSERA_FAMILIES)

MATRIX_KINDS = frozenset({"gemm", "conv", "attention", "rnn"})
"""Families whose work is counted in FLOPs."""


def is_listed(name: str) -> bool:
    """Whether the tables here list the operator; `kind_of` takes all others as elementwise."""
    short = _short(name)
    return name.startswith("tessera.") or any(
        n in KINDS or n in _ELEMENTWISE or n.startswith(_MULTI_TENSOR) for n in (short, short.rstrip("_"))
    )


def kind_of(name: str) -> str:
    """The family of "aten.addmm", "aten._foreach_add_" or "tessera::norm"; an unknown operator is elementwise."""
    name = name.replace("::", ".")
    short = _short(name)
    if name.startswith("tessera.") and short in _TESSERA_KINDS:
        return _TESSERA_KINDS[short]
    if short.startswith(_MULTI_TENSOR):
        return "foreach"
    return KINDS.get(short) or KINDS.get(short.rstrip("_"), "elementwise")


def _short(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith(("aten.", "tessera.", "prims.", "torchvision.")) else name
