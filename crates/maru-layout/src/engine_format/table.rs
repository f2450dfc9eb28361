//! The table: a number, a name, and the order that the name spells.

use super::EnginePointers::{self, LayerMajor, One, PerLayer, PlaneMajor};
use crate::Axis::{self, Block, Content, Dim, Head, Kv, Layer, Token};

/// What a format's last axis holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Width {
    /// `head_size` elements.
    Head,
    /// K and V of a head, kept together.
    TwoHeads,
    /// Opaque content of a stated width.
    Stated,
}

/// How a format's tensors lie in memory, outermost axis first.
#[derive(Debug)]
pub(super) struct Shape {
    pub(super) pointers: EnginePointers,
    pub(super) order: &'static [Axis],
    pub(super) width: Width,
}

#[derive(Debug)]
pub(super) struct Row {
    pub(super) number: i64,
    pub(super) name: &'static str,
    /// How token operations read it, or why it is refused.
    pub(super) shape: Result<Shape, &'static str>,
    /// How block operations read it, where that differs.
    pub(super) block_shape: Option<Shape>,
}

const fn shape(pointers: EnginePointers, order: &'static [Axis]) -> Shape {
    Shape { pointers, order, width: Width::Head }
}

const fn row(number: i64, name: &'static str, pointers: EnginePointers, order: &'static [Axis]) -> Row {
    Row { number, name, shape: Ok(shape(pointers, order)), block_shape: None }
}

const fn packed(number: i64, name: &'static str, order: &'static [Axis], width: Width) -> Row {
    let shape = Shape { pointers: EnginePointers::PerLayer, order, width };
    Row { number, name, shape: Ok(shape), block_shape: None }
}

const fn refused(number: i64, name: &'static str, reason: &'static str) -> Row {
    Row { number, name, shape: Err(reason), block_shape: None }
}

pub(super) static TABLE: [Row; 19] = [
    Row {
        number: 0,
        name: "NB_NL_TWO_BS_NH_HS",
        shape: Ok(shape(PerLayer, &[Kv, Block, Token, Head, Dim])),
        block_shape: Some(shape(One, &[Block, Layer, Kv, Token, Head, Dim])),
    },
    row(1, "NL_X_TWO_NB_BS_NH_HS", PerLayer, &[Kv, Block, Token, Head, Dim]),
    row(2, "NL_X_NB_TWO_BS_NH_HS", PerLayer, &[Block, Kv, Token, Head, Dim]),
    row(3, "NL_X_NB_BS_HS", PerLayer, &[Block, Token, Dim]),
    row(4, "TWO_X_NL_X_NBBS_NH_HS", PlaneMajor, &[Block, Token, Head, Dim]),
    row(5, "NL_X_NBBS_ONE_HS", PerLayer, &[Block, Token, Dim]),
    row(6, "NL_X_TWO_NB_NH_BS_HS", PerLayer, &[Kv, Block, Head, Token, Dim]),
    row(7, "NL_X_NB_TWO_NH_BS_HS", PerLayer, &[Block, Kv, Head, Token, Dim]),
    row(8, "NB_NL_TWO_NH_BS_HS", One, &[Block, Layer, Kv, Head, Token, Dim]),
    row(9, "TWO_X_NL_X_NB_BS_NH_HS", PlaneMajor, &[Block, Token, Head, Dim]),
    packed(10, "NL_X_NB_NH_BS_TWO_HS", &[Block, Head, Token, Content], Width::TwoHeads),
    packed(11, "NL_X_NB_BS_NH_TWO_HS", &[Block, Token, Head, Content], Width::TwoHeads),
    packed(12, "NL_X_NB_NH_BS_CS", &[Block, Head, Token, Content], Width::Stated),
    packed(13, "NL_X_NB_BS_NH_CS", &[Block, Token, Head, Content], Width::Stated),
    refused(14, "NL_X_NB_BSV_BSS", "a token's values and scales are apart from each other inside a page"),
    refused(15, "NL_X_TWO_NB_NH_ONE_BS_HS", "its rows have an axis that no slab has"),
    row(16, "NL_X_TWO_X_NB_BS_NH_HS", LayerMajor, &[Block, Token, Head, Dim]),
    refused(17, "NL_X_NP_X_NB_BS_ONE_HS", "its planes have different widths; register each as its own cache"),
    refused(18, "NL_X_NB_BS_NH_HS", "whether its heads are of K, V or both is not in the format"),
];
