//! Result of an experiment: the paper's numbers beside ours.

use super::plot::Figure;
use holdfast_sim::Estimate;
use serde::Serialize;

/// One point of a paper's table or figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResultRow {
    /// Name of the point: panel, series and position.
    pub point: String,
    /// Value in the paper's text; none if the text has no value for the point.
    pub paper: Option<f64>,
    /// Our value, the mean of the repeats.
    pub ours: f64,
    /// Half the width of our value's 95 % confidence interval; none for a single repeat.
    pub ci95: Option<f64>,
    /// Unit of both values.
    pub unit: String,
}

impl ResultRow {
    /// Creates a row that is no point of a figure, such as a table's.
    pub fn new(
        point: impl Into<String>,
        paper: Option<f64>,
        ours: Estimate,
        unit: impl Into<String>,
    ) -> ResultRow {
        ResultRow {
            point: point.into(),
            paper,
            ours: ours.mean,
            ci95: ours.ci95,
            unit: unit.into(),
        }
    }
}

/// A statement of the paper's text, or a bar set for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StatementCheck {
    /// The result that the paper states, or the bar.
    pub statement: String,
    /// True if the statement holds.
    pub holds: bool,
    /// The measured values that decide.
    pub seen: String,
}

/// The result of an experiment.
#[derive(Clone, Debug, Default)]
pub struct ExperimentOutcome {
    /// Facts needed to read the numbers: repeats, durations, the machine's other load, omissions.
    pub notes: Vec<String>,
    /// Every measured point.
    pub rows: Vec<ResultRow>,
    /// Checks of the paper's statements.
    pub checks: Vec<StatementCheck>,
    /// The rows as curves, if there are curves.
    pub figure: Option<Figure>,
}

impl ExperimentOutcome {
    /// Creates an outcome with all points of `figure` as rows.
    #[must_use]
    pub fn from_figure(figure: Figure, notes: Vec<String>) -> ExperimentOutcome {
        ExperimentOutcome {
            notes,
            rows: figure.rows(),
            checks: Vec::new(),
            figure: Some(figure),
        }
    }

    /// Returns the outcome as a table of text.
    pub(super) fn text(&self) -> String {
        let heading = ["point", "paper", "ours", "± (95 %)", "unit"];
        let mut lines = vec![heading.map(str::to_owned)];
        lines.extend(self.rows.iter().map(row_cells));
        let width = |column: usize| {
            let lengths = lines.iter().map(|line| line[column].chars().count());
            lengths.max().unwrap_or(0)
        };
        let widths: [usize; 5] = std::array::from_fn(width);
        let [point, paper, ours, ci95, _] = widths;
        let line = |cells: &[String; 5]| {
            let [a, b, c, d, e] = cells;
            format!("{a:<point$}  {b:>paper$}  {c:>ours$}  {d:>ci95$}  {e}\n")
        };
        let table: String = lines.iter().map(line).collect();
        let notes: String = self.notes.iter().map(|note| format!("{note}\n")).collect();
        let check = |check: &StatementCheck| {
            let verdict = if check.holds {
                "holds"
            } else {
                "DOES NOT HOLD"
            };
            format!("{verdict}: {} ({})\n", check.statement, check.seen)
        };
        let checks: String = self.checks.iter().map(check).collect();
        notes + &table + &checks
    }
}

fn row_cells(row: &ResultRow) -> [String; 5] {
    let or_none = |value: Option<f64>| value.map_or("-".to_owned(), format_significant);
    [
        row.point.clone(),
        or_none(row.paper),
        format_significant(row.ours),
        or_none(row.ci95),
        row.unit.clone(),
    ]
}

/// Formats a value with three significant digits, or all digits before the point.
pub(super) fn format_significant(value: f64) -> String {
    let digits = match value.abs() {
        small if small < 0.001 => 5,
        small if small < 1.0 => 3,
        small if small < 10.0 => 2,
        small if small < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_one_line_per_row() {
        let estimate = Estimate::from_repeats(&[3.0, 3.0]);
        let mut outcome = ExperimentOutcome {
            notes: vec!["2 repeats".to_owned()],
            ..ExperimentOutcome::default()
        };
        outcome
            .rows
            .push(ResultRow::new("A, 2,000 PEs", Some(90.0), estimate, "%"));
        outcome.rows.push(ResultRow::new(
            "B",
            None,
            Estimate::from_repeats(&[1234.5]),
            "1/s",
        ));
        let text = outcome.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "2 repeats");
        assert_eq!(lines[1], "point         paper  ours  ± (95 %)  unit");
        assert_eq!(lines[2], "A, 2,000 PEs   90.0  3.00   0.00000  %");
        assert_eq!(lines[3], "B                 -  1234         -  1/s");
    }
}
