//! Token → slot.

use std::sync::Arc;

use crate::LayoutError;

/// Where each token of a transfer lives in the paged cache: `block * block_size + offset`, −1 to skip it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotMapping {
    /// Slots in host memory; checked before anything is queued.
    Host(Arc<[i64]>),
    /// Slots in memory the device reads (`i64`, contiguous); the kernel checks their range.
    Device {
        /// Device address of the first.
        addr: u64,
        /// How many.
        len: u64,
    },
}

impl SlotMapping {
    /// Slots as the engine lists them, one per token.
    pub fn from_slots(slots: impl Into<Arc<[i64]>>) -> Self {
        SlotMapping::Host(slots.into())
    }

    /// Slots of the tokens `tokens` (positions in the sequence) of a request whose blocks are `blocks`.
    ///
    /// ```
    /// use maru_layout::SlotMapping;
    /// // Tokens 14..18 of a sequence in blocks 7 and 2 of 16 tokens.
    /// let slots = SlotMapping::from_blocks(&[7, 2], 16, 14..18)?;
    /// assert_eq!(slots, SlotMapping::from_slots(vec![126, 127, 32, 33]));
    /// # Ok::<(), maru_layout::LayoutError>(())
    /// ```
    ///
    /// # Errors
    /// [`LayoutError::OutOfRange`] for a block size of 0, a reversed or too long token range, or a negative
    /// block; [`LayoutError::Overflow`] when a slot does not fit 63 bits.
    pub fn from_blocks(
        blocks: &[i64],
        block_size: u64,
        tokens: std::ops::Range<u64>,
    ) -> Result<Self, LayoutError> {
        if block_size == 0 {
            return Err(LayoutError::OutOfRange {
                what: "block_size",
                found: 0,
                allowed: "1 or more".into(),
            });
        }
        let room = u64::try_from(blocks.len()).unwrap_or(u64::MAX).saturating_mul(block_size);
        if tokens.start > tokens.end || tokens.end > room {
            return Err(LayoutError::OutOfRange {
                what: "end of the token range",
                found: i128::from(tokens.end),
                allowed: format!(
                    "{} to {room} ({} blocks of {block_size})",
                    tokens.start.min(room),
                    blocks.len()
                ),
            });
        }
        let overflow = LayoutError::Overflow { what: "a slot" };
        let len = usize::try_from(tokens.end - tokens.start).map_err(|_| overflow.clone())?;
        let mut slots = Vec::new();
        slots.try_reserve_exact(len).map_err(|_| LayoutError::OutOfRange {
            what: "length of the token range",
            found: i128::from(tokens.end - tokens.start),
            allowed: "what fits into memory".into(),
        })?;
        let mut token = tokens.start;
        while token < tokens.end {
            let (index, offset) = (token / block_size, token % block_size);
            let block = usize::try_from(index).ok().and_then(|i| blocks.get(i)).copied().unwrap_or(-1);
            let block = u64::try_from(block).map_err(|_| LayoutError::OutOfRange {
                what: "block id",
                found: i128::from(block),
                allowed: "0 or more".into(),
            })?;
            let n = (block_size - offset).min(tokens.end - token);
            let first = block.checked_mul(block_size).and_then(|s| s.checked_add(offset));
            let first = first.and_then(|s| i64::try_from(s).ok()).ok_or_else(|| overflow.clone())?;
            let last =
                i64::try_from(n).ok().and_then(|n| first.checked_add(n)).ok_or_else(|| overflow.clone())?;
            slots.extend(first..last);
            token += n;
        }
        Ok(SlotMapping::Host(slots.into()))
    }

    /// Tokens it covers.
    pub fn len(&self) -> u64 {
        match self {
            SlotMapping::Host(slots) => u64::try_from(slots.len()).unwrap_or(u64::MAX),
            SlotMapping::Device { len, .. } => *len,
        }
    }

    /// Whether it covers none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
