"""The published families, one module per family; each module's `FAMILY` is what the registry reads.

`build` takes constructor arguments under upstream's names. It explains those that do not say what they are;
these mean the same in all families:

* `n_classes`, `num_classes`, `num_labels`: number of classes.
* `img_size`, `patch_size`: height and width in pixels; `in_chans`: channels of the input.
* `embed_dim`, `depth`, `num_heads`: width, number of blocks and heads per block of the full network.
* `width_mult`: width multiplier of the network.
* `bn_param`: momentum and eps of every BatchNorm.
* `dropout_rate`: dropout rate before the classifier; `drop_rate`, `attn_drop_rate`: dropout rates of a
  transformer and of its attention weights; `drop_path_rate`: stochastic depth rate of the last block.
* `ks_list`, `expand_ratio_list`, `depth_list`: choices of kernel size and expansion ratio per block, and of
  depth per stage.
* `kernel_transform_mode`: upstream's class attribute. If 1, smaller kernels are made by learned matrices; if
  None, they are centre crops of the largest.
* `base_stage_width` and `input_size`: ignored, as upstream ignores them or takes any size.

`mobile` and `vision_transformer` hold what several families share.
"""
