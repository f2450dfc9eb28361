//! A dated CSV file of a record: rows by column name, and what made it.

use std::collections::HashMap;
use std::path::Path;

type Error = Box<dyn std::error::Error>;

/// A record's file.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// `2026-11-30-transfer`
    pub(super) stem: String,
    /// From the file's name.
    pub(super) date: String,
    /// The lines `# key: value` before the head.
    notes: HashMap<String, String>,
    pub(super) columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// One row of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'a> {
    table: &'a Table,
    fields: &'a [String],
}

impl Table {
    pub(super) fn read(path: &Path) -> Result<Table, Error> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        Table::parse(&stem, &text).map_err(|e| format!("{}: {e}", path.display()).into())
    }

    /// Rows with more or fewer fields than the head are left out: probes with commas in their names, and the last
    /// line of a run that was cut off.
    pub(super) fn parse(stem: &str, text: &str) -> Result<Table, Error> {
        let mut table = Table { stem: stem.to_owned(), ..Table::default() };
        let dated = |date: &str| date.bytes().all(|b| b.is_ascii_digit() || b == b'-');
        table.date = stem.get(..10).filter(|date| dated(date)).unwrap_or_default().to_owned();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            if let Some(note) = line.strip_prefix('#') {
                let (key, value) = note.split_once(':').unwrap_or((note, ""));
                table.notes.insert(key.trim().to_owned(), value.trim().to_owned());
            } else if line.contains('"') {
                return Err(format!("quoted fields are not read: {line}").into());
            } else if table.columns.is_empty() {
                table.columns = fields(line);
            } else {
                table.rows.push(fields(line));
            }
        }
        let columns = table.columns.len();
        table.rows.retain(|row| row.len() == columns);
        Ok(table)
    }

    pub(super) fn note(&self, key: &str) -> Option<&str> {
        self.notes.get(key).map(String::as_str)
    }

    pub(super) fn has(&self, columns: &[&str]) -> bool {
        columns.iter().all(|wanted| self.columns.iter().any(|column| column == wanted))
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.rows.iter().map(|fields| Row { table: self, fields })
    }
}

impl<'a> Row<'a> {
    /// The text in a column; empty where there is no such column.
    pub(super) fn text(self, column: &str) -> &'a str {
        let index = self.table.columns.iter().position(|name| name == column);
        index.and_then(|i| self.fields.get(i)).map_or("", String::as_str)
    }

    /// A finite number.
    pub(super) fn number(self, column: &str) -> Option<f64> {
        self.text(column).parse().ok().filter(|number: &f64| number.is_finite())
    }
}

fn fields(line: &str) -> Vec<String> {
    line.split(',').map(|field| field.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_head_and_rows() {
        let text = "# device: GPU, image: x\n# command: transfer --quick\na,b\n1,x\n2\n3,y,z\nNaN,w\n";
        let table = Table::parse("2026-11-30-transfer", text).expect("a table");
        assert_eq!((table.note("device"), table.date.as_str()), (Some("GPU, image: x"), "2026-11-30"));
        let rows: Vec<_> = table.rows().map(|row| (row.number("a"), row.text("b"), row.text("c"))).collect();
        assert_eq!(rows, [(Some(1.0), "x", ""), (None, "w", "")]);
        assert!(table.has(&["a", "b"]) && !table.has(&["a", "c"]));
    }

    #[test]
    fn what_is_not_understood_is_said() {
        assert!(Table::parse("x", "a,b\n\"1,2\",3\n").is_err());
        assert_eq!(Table::parse("undated", "a\n1\n").expect("a table").date, "");
    }
}
