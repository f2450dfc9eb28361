//! `maru layout`: what detection reads from a tensor.

use maru::layout::{Axis, CacheSpec, DType, LayoutError, PagedLayout, RowKind, TensorDesc};
use serde_json::json;

use crate::args::LayoutArgs;
use crate::error::CliError;
use crate::output::{Line, Outcome, human_bytes};

/// What tells one reading from another.
const OPTIONS: &str = "--axes, --block-size, --kv-heads, --head-size, --num-blocks, --mla";

pub(crate) fn run(args: &LayoutArgs) -> Result<Outcome, CliError> {
    let dtype: DType = args.dtype.trim().parse()?;
    let shape = numbers("--shape", &args.shape)?;
    let tensor = match &args.stride {
        Some(stride) => TensorDesc::strided(&shape, &numbers("--stride", stride)?, dtype)?,
        None => TensorDesc::contiguous(&shape, dtype)?,
    };
    let base_offset = count("--base-offset", args.base_offset.as_deref())?.unwrap_or(0);
    let layout = PagedLayout::detect(&tensor, &spec(args)?).map_err(|error| match error {
        LayoutError::Ambiguous { .. } => CliError::Undecided { source: error, options: OPTIONS },
        other => other.into(),
    })?;
    Ok(Outcome {
        json: as_json(&layout, base_offset),
        human: explain(&tensor, &layout, base_offset),
        success: true,
    })
}

fn spec(args: &LayoutArgs) -> Result<CacheSpec, CliError> {
    Ok(CacheSpec {
        block_size: count("--block-size", args.block_size.as_deref())?,
        num_kv_heads: count("--kv-heads", args.kv_heads.as_deref())?,
        head_size: count("--head-size", args.head_size.as_deref())?,
        num_blocks: count("--num-blocks", args.num_blocks.as_deref())?,
        mla: args.mla,
        axes: args.axes.as_deref().map(Axis::parse_list).transpose()?,
        ..CacheSpec::default()
    })
}

/// A list such as `6,2,16`, also as Python prints it: `(6, 2, 16)` or `[6, 2, 16]`.
fn numbers(option: &str, text: &str) -> Result<Vec<i64>, CliError> {
    let inner = text.trim();
    let inner = inner
        .strip_prefix('(')
        .and_then(|t| t.strip_suffix(')'))
        .or_else(|| inner.strip_prefix('[').and_then(|t| t.strip_suffix(']')))
        .unwrap_or(inner);
    inner.split(',').map(|word| number(option, word)).collect()
}

fn number(option: &str, word: &str) -> Result<i64, CliError> {
    let word = word.trim();
    word.parse().map_err(|_| {
        let found = if word.is_empty() { "nothing".to_owned() } else { format!("{word:?}") };
        let example = match option {
            "--shape" | "--stride" => "; several stand with commas between, such as 6,2,16,2,128",
            _ => "",
        };
        CliError::invalid(format!("{option} has {found} where a whole number is needed{example}"))
    })
}

fn count(option: &str, text: Option<&str>) -> Result<Option<u64>, CliError> {
    let Some(text) = text else {
        return Ok(None);
    };
    let found = number(option, text)?;
    let negative = |_| CliError::invalid(format!("{option} is {found}; 0 or more is needed"));
    u64::try_from(found).map(Some).map_err(negative)
}

fn as_json(layout: &PagedLayout, base_offset: u64) -> serde_json::Value {
    let strides = layout.byte_strides();
    json!({
        "axes": layout.axes().iter().map(|a| a.name()).collect::<Vec<_>>(),
        "kv_planes": layout.kv_planes(),
        "num_blocks": layout.num_blocks(),
        "block_size": layout.block_size(),
        "num_heads": layout.num_heads(),
        "head_size": layout.head_size(),
        "num_slots": layout.num_slots(),
        "byte_strides": {
            "kv": strides.kv,
            "block": strides.block,
            "token": strides.token,
            "head": strides.head,
        },
        "row_bytes": layout.row_bytes(),
        "access_bytes": layout.access_bytes(base_offset),
        "native": layout.kernel_limits().is_ok(),
        "slab_token_bytes": layout.slab_token_bytes(),
    })
}

fn explain(tensor: &TensorDesc, layout: &PagedLayout, base_offset: u64) -> Vec<Line> {
    let mut lines = vec![Line::Title(summary(layout)), Line::plain("")];
    lines.push(Line::plain(format!("  {:<10} {:>12} {:>16}", "axis", "length", "byte stride")));
    for (i, axis) in layout.axes().iter().enumerate() {
        let (Some(len), Some(stride)) = (tensor.shape().get(i), tensor.strides().get(i)) else {
            continue;
        };
        let stride = match len {
            1 => "-".to_owned(),
            _ => stride.saturating_mul(layout.dtype().size()).to_string(),
        };
        lines.push(Line::plain(format!("  {:<10} {len:>12} {stride:>16}", axis.name())));
    }
    lines.push(Line::plain(""));
    lines.extend(facts(layout, base_offset).into_iter().map(|fact| Line::plain(format!("  {fact}"))));
    lines
}

fn summary(layout: &PagedLayout) -> String {
    let row = match layout.row_kind() {
        RowKind::OpaqueBlocks => {
            return format!(
                "{} opaque blocks of {} each, moved whole",
                layout.num_blocks(),
                human_bytes(layout.slab_token_bytes())
            );
        }
        RowKind::OpaqueRows => "opaque content of",
        _ => "dimension",
    };
    let heads = match layout.num_heads() {
        1 => "1 head".to_owned(),
        n => format!("{n} heads"),
    };
    let layers = match layout.layers() {
        1 => String::new(),
        n => format!("{n} layers in one tensor, "),
    };
    format!(
        "{layers}{} blocks of {} tokens, {heads}, {row} {}, {}, {}",
        layout.num_blocks(),
        layout.block_size(),
        layout.head_size(),
        layout.dtype(),
        if layout.kv_planes() == 2 { "K and V in the tensor" } else { "one plane" },
    )
}

fn facts(layout: &PagedLayout, base_offset: u64) -> Vec<String> {
    let strides = layout.byte_strides();
    let mut facts = vec![format!(
        "slots: {} (block * {} + offset in the block)",
        layout.num_slots(),
        layout.block_size()
    )];
    if layout.num_heads() > 1 {
        facts.push(match layout.heads_adjacent() {
            true => "heads of a token lie side by side (NHD)".to_owned(),
            false => format!(
                "heads of a token lie {} bytes apart, so a token moves in {} rows",
                strides.head.unwrap_or(0),
                layout.num_heads()
            ),
        });
    }
    if let (Some(kv), 2) = (strides.kv, layout.kv_planes()) {
        facts.push(format!("V lies {kv} bytes behind K"));
    }
    if layout.block_size() > 1 && layout.linear_slots() && layout.num_blocks() > 1 {
        facts.push("blocks follow each other as tokens do, without gaps between them".to_owned());
    }
    facts.push(format!(
        "contiguous on both sides: rows of {} bytes, in accesses of {} byte(s){}",
        layout.row_bytes(),
        layout.access_bytes(base_offset),
        if layout.access_bytes(base_offset) < 16 { " (16 where alignment allows)" } else { "" }
    ));
    facts.push(format!("in the slab: {} bytes per token and layer", layout.slab_token_bytes()));
    facts.push(match layout.kernel_limits() {
        Ok(()) => "the native kernel takes this layout".to_owned(),
        Err(error) => format!("the native kernel does not take it: {error}"),
    });
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_people_and_python_write_them() {
        for text in ["6,2,16", " 6, 2 ,16 ", "(6, 2, 16)", "[6,2,16]"] {
            assert_eq!(numbers("--shape", text).unwrap(), [6, 2, 16], "{text}");
        }
        assert_eq!(numbers("--shape", "-9223372036854775808").unwrap(), [i64::MIN]);
    }

    #[test]
    fn what_is_no_number_is_named_with_its_option() {
        for text in ["", "1,", "a", "1,,2", "9223372036854775808", "1.5", "(1,2", "0x10"] {
            let message = numbers("--stride", text).unwrap_err().to_string();
            assert!(message.starts_with("--stride has "), "{text}: {message}");
        }
    }

    #[test]
    fn counts_are_not_negative() {
        assert_eq!(count("--kv-heads", None).unwrap(), None);
        assert_eq!(count("--kv-heads", Some("8")).unwrap(), Some(8));
        let message = count("--kv-heads", Some("-8")).unwrap_err().to_string();
        assert_eq!(message, "--kv-heads is -8; 0 or more is needed");
    }
}
