//! Checks the licences that dependencies state, from `cargo metadata`: no network, no extra tool.

use std::process::Command;

use serde_json::Value;

use crate::Outcome;

/// Licences that may be combined with Apache-2.0 without further conditions on users.
const ACCEPTED: &[&str] = &[
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "MIT",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "0BSD",
];

pub(crate) fn run() -> Outcome {
    let output =
        Command::new(env!("CARGO")).args(["metadata", "--format-version", "1", "--locked"]).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let mut refused = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or("?");
        let licence = package["license"].as_str().unwrap_or("none stated");
        if !accepted(licence) {
            refused.push(format!("{name} {}: {licence}", package["version"].as_str().unwrap_or("?")));
        }
    }
    if refused.is_empty() {
        println!("{} packages, every licence accepted", packages.len());
        return Ok(());
    }
    Err(format!("licences not accepted:\n{}", refused.join("\n")).into())
}

/// Whether an SPDX expression leaves a choice that is accepted: one part of an `OR`, every part of an `AND`,
/// which binds tighter. The old spelling with `/` means `OR`.
fn accepted(expression: &str) -> bool {
    let text = expression.replace('/', " OR ");
    let text = text.trim();
    if let Some(parts) = split(text, " OR ") {
        return parts.iter().any(|p| accepted(p));
    }
    if let Some(parts) = split(text, " AND ") {
        return parts.iter().all(|p| accepted(p));
    }
    match text.strip_prefix('(').and_then(|t| t.strip_suffix(')')) {
        Some(inner) => accepted(inner),
        None => ACCEPTED.contains(&text),
    }
}

/// Parts at an operator outside parentheses, if it occurs there.
fn split<'a>(text: &'a str, operator: &str) -> Option<Vec<&'a str>> {
    let (mut depth, mut start, mut parts) = (0i32, 0, Vec::new());
    for (i, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ' ' if depth == 0 && text[i..].starts_with(operator) => {
                parts.push(&text[start..i]);
                start = i + operator.len();
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    (parts.len() > 1).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::accepted;

    #[test]
    fn licence_expressions() {
        for (expression, ok) in [
            ("MIT OR Apache-2.0", true),
            ("MIT/Apache-2.0", true),
            ("GPL-3.0", false),
            ("MIT OR GPL-3.0", true),
            ("MIT AND GPL-3.0", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("(MIT OR Apache-2.0) AND GPL-2.0", false),
            ("MIT OR GPL-2.0 AND GPL-3.0", true),
            ("none stated", false),
        ] {
            assert_eq!(accepted(expression), ok, "{expression}");
        }
    }
}
