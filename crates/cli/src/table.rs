//! Text tables for the terminal.

/// Rows under a heading; each column is as wide as its widest cell.
pub struct TextTable {
    rows: Vec<Vec<String>>,
}

impl TextTable {
    /// Returns a table with these column headings.
    pub fn new<const N: usize>(heading: [&str; N]) -> Self {
        Self {
            rows: vec![heading.map(str::to_owned).into()],
        }
    }

    /// Adds a row; an empty cell becomes `-`.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        let displayed = |cell: String| {
            if cell.is_empty() {
                "-".to_owned()
            } else {
                cell
            }
        };
        self.rows.push(cells.map(displayed).into());
    }

    /// Returns the table's text, with a newline after each row.
    pub fn text(&self) -> String {
        let columns = self.rows.first().map_or(0, Vec::len);
        let width = |column: usize| {
            self.rows
                .iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        };
        self.rows.iter().map(line).collect()
    }
}

/// Formats an optional number.
pub fn optional_number(value: Option<impl std::fmt::Display>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

/// Formats optional microseconds as a whole number.
pub fn optional_micros(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| format!("{value:.0}"))
}

#[cfg(test)]
mod tests {
    use super::TextTable;

    #[test]
    fn columns_are_as_wide_as_needed() {
        let mut table = TextTable::new(["flow", "owner"]);
        table.row(["tcp:a-b".into(), String::new()]);
        assert_eq!(table.text(), "flow     owner\ntcp:a-b  -\n");
    }
}
