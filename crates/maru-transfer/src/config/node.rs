//! The tree a configuration is read from, the same for TOML text and for dicts, in which every
//! value knows its path and, from text, its line.
//!
//! Reading from such a tree by hand, rather than by serde's derive, is what lets every error
//! name the key's full path, its line, what was found and what is allowed.

use std::collections::HashMap;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Location};

/// Deeper values are never looked into (the deepest key is `cxl.pool[0].path`), so they are not
/// converted either: a tree of any depth costs nothing.
const MAX_DEPTH: u32 = 6;

/// One value and where it was written.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    /// The path as written, for messages.
    pub(super) path: String,
    pub(super) line: Option<u32>,
    pub(super) value: Value,
}

#[derive(Debug, Clone)]
pub(super) enum Value {
    Bool(bool),
    Integer(i64),
    /// An integer that needs more than 64 bits.
    BigInteger(String),
    Float(String),
    Text(String),
    Datetime(String),
    Array(Vec<Node>),
    Table(Vec<(String, Node)>),
}

impl Node {
    /// Parses TOML text.
    pub(crate) fn parse(text: &str, origin: &Arc<str>) -> Result<Node, ConfigError> {
        let lines = Lines::of(text);
        let table = DeTable::parse(text).map_err(|error| {
            let error = earliest(text, error);
            let line = error.span().map(|span| lines.at(span.start));
            ConfigError::Syntax { at: Location::new(origin, line), message: syntax_message(text, &error) }
        })?;
        Ok(Node { path: String::new(), line: None, value: convert_table(table.get_ref(), "", &lines, 0) })
    }

    /// Takes over a table that came as data.
    pub(crate) fn from_table(table: &toml::Table) -> Node {
        Node { path: String::new(), line: None, value: from_toml_table(table, "", 0) }
    }

    pub(super) fn from_value(path: String, value: &toml::Value) -> Node {
        let depth = 1;
        Node { value: from_toml_value(value, &path, depth), path, line: None }
    }

    /// Type and value in words: "the text \"4X\"", "the integer 5", "a table".
    pub(super) fn describe(&self) -> String {
        match &self.value {
            Value::Bool(b) => format!("the boolean {b}"),
            Value::Integer(i) => format!("the integer {i}"),
            Value::BigInteger(i) => format!("the integer {}", shortened(i)),
            Value::Float(f) => format!("the float {}", shortened(f)),
            Value::Text(text) => format!("the text {}", quoted(text)),
            Value::Datetime(d) => format!("the date or time {d}"),
            Value::Array(_) => "an array".to_owned(),
            Value::Table(_) => "a table".to_owned(),
        }
    }
}

/// The text in quotes, escaped, cut where nobody would read on.
pub(crate) fn quoted(text: &str) -> String {
    format!("{:?}", shortened(text))
}

fn shortened(text: &str) -> String {
    const KEEP: usize = 60;
    match text.char_indices().nth(KEEP) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text.to_owned(),
    }
}

/// `parent.key`, with quotes where TOML would need them.
pub(super) fn joined(parent: &str, key: &str) -> String {
    let bare = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    let key = if bare { shortened(key) } else { quoted(key) };
    if parent.is_empty() { key } else { format!("{parent}.{key}") }
}

/// The parser reports one error, not always the one that comes first in the text: after a forgotten
/// quotation mark that would be the line below.
fn earliest(text: &str, reported: toml::de::Error) -> toml::de::Error {
    // Every error is formatted, so hostile text could make a great many of them.
    const MODERATE: usize = 64 << 10;
    if text.len() > MODERATE {
        return reported;
    }
    let start = |error: &toml::de::Error| error.span().map_or(usize::MAX, |span| span.start);
    let (_, others) = DeTable::parse_recoverable(text);
    others
        .into_iter()
        .fold(reported, |first, other| if start(&other) < start(&first) { other } else { first })
}

fn syntax_message(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().to_owned();
    let found = error.span().and_then(|span| text.get(span)).unwrap_or("");
    if found.trim().is_empty() || found.contains('\n') {
        message
    } else {
        format!("{message} (at {})", quoted(found))
    }
}

fn convert(value: &Spanned<DeValue<'_>>, path: String, lines: &Lines, depth: u32) -> Node {
    let line = Some(lines.at(value.span().start));
    let value = match value.get_ref() {
        DeValue::Boolean(b) => Value::Bool(*b),
        DeValue::Integer(i) => match i64::from_str_radix(i.as_str(), i.radix()) {
            Ok(i) => Value::Integer(i),
            Err(_) => Value::BigInteger(i.as_str().to_owned()),
        },
        DeValue::Float(f) => Value::Float(f.as_str().to_owned()),
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Datetime(d) => Value::Datetime(d.to_string()),
        DeValue::Array(_) if depth >= MAX_DEPTH => Value::Array(Vec::new()),
        DeValue::Array(items) => Value::Array(
            items
                .iter()
                .enumerate()
                .map(|(i, item)| convert(item, format!("{path}[{i}]"), lines, depth + 1))
                .collect(),
        ),
        DeValue::Table(table) => convert_table(table, &path, lines, depth),
    };
    Node { path, line, value }
}

fn convert_table(table: &DeTable<'_>, path: &str, lines: &Lines, depth: u32) -> Value {
    if depth >= MAX_DEPTH {
        return Value::Table(Vec::new());
    }
    let entry = |(key, value): (&Spanned<_>, _)| {
        let name: &str = std::borrow::Cow::as_ref(key.get_ref());
        let mut node = convert(value, joined(path, name), lines, depth + 1);
        // The line of the key: a multi-line value may start further down.
        node.line = Some(lines.at(key.span().start));
        (name.to_owned(), node)
    };
    Value::Table(table.iter().map(entry).collect())
}

fn from_toml_value(value: &toml::Value, path: &str, depth: u32) -> Value {
    match value {
        toml::Value::Boolean(b) => Value::Bool(*b),
        toml::Value::Integer(i) => Value::Integer(*i),
        toml::Value::Float(f) => Value::Float(format!("{f:?}")),
        toml::Value::String(text) => Value::Text(text.clone()),
        toml::Value::Datetime(d) => Value::Datetime(d.to_string()),
        toml::Value::Array(_) if depth >= MAX_DEPTH => Value::Array(Vec::new()),
        toml::Value::Array(items) => Value::Array(
            items
                .iter()
                .enumerate()
                .map(|(i, item)| {
                    let path = format!("{path}[{i}]");
                    Node { value: from_toml_value(item, &path, depth + 1), path, line: None }
                })
                .collect(),
        ),
        toml::Value::Table(table) => from_toml_table(table, path, depth),
    }
}

fn from_toml_table(table: &toml::Table, path: &str, depth: u32) -> Value {
    if depth >= MAX_DEPTH {
        return Value::Table(Vec::new());
    }
    let entry = |(key, value): (&String, &toml::Value)| {
        let path = joined(path, key);
        let node = Node { value: from_toml_value(value, &path, depth + 1), path, line: None };
        (key.clone(), node)
    };
    Value::Table(table.iter().map(entry).collect())
}

/// Byte offset to line number.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Lines(text.match_indices('\n').map(|(i, _)| i).collect())
    }

    fn at(&self, offset: usize) -> u32 {
        let before = self.0.partition_point(|&newline| newline < offset);
        u32::try_from(before).map_or(u32::MAX, |n| n.saturating_add(1))
    }
}

/// Where each key was written: from the key's canonical path (`transfer.sm_budget`) to the path
/// it was written under (`maru_sm_budget` in the flat form) and its line.
#[derive(Debug)]
pub(crate) struct Sources {
    pub(crate) origin: Arc<str>,
    keys: HashMap<String, (String, Option<u32>)>,
}

impl Sources {
    pub(crate) fn new(origin: Arc<str>) -> Self {
        Sources { origin, keys: HashMap::new() }
    }

    pub(super) fn location(&self, line: Option<u32>) -> Location {
        Location::new(&self.origin, line)
    }

    pub(super) fn note(&mut self, canonical: String, node: &Node) {
        self.keys.insert(canonical, (node.path.clone(), node.line));
    }

    pub(super) fn locate(&self, at: &mut Location, key: &mut String) {
        let mut line = None;
        if let Some((written, written_line)) = self.keys.get(key.as_str()) {
            *key = written.clone();
            line = *written_line;
        }
        *at = self.location(line);
    }
}
