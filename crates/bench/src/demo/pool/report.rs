//! Results of the demonstration, and their comparison with its promises.

use std::time::Duration;

use serde::Serialize;

use super::client::Counts;
use super::{Deaths, PoolDemoSpec};

/// Results of the demonstration.
#[derive(Debug, Serialize)]
pub struct PoolReport {
    /// Parameters of the demonstration.
    pub spec: PoolDemoSpec,
    /// True if every promise is kept.
    pub passed: bool,
    /// Broken promises.
    pub problems: Vec<String>,
    /// Results of the client.
    pub client: Counts,
    /// Recovery of the pool.
    pub deaths: Deaths,
    /// Duration of the demonstration, seconds.
    pub total_s: f64,
}

impl PoolReport {
    pub(super) fn new(
        spec: &PoolDemoSpec,
        client: Counts,
        deaths: Deaths,
        total: Duration,
    ) -> PoolReport {
        let mut report = PoolReport {
            spec: spec.clone(),
            passed: false,
            problems: Vec::new(),
            client,
            deaths,
            total_s: total.as_secs_f64(),
        };
        report.problems = report.problems();
        report.passed = report.problems.is_empty();
        report
    }

    fn problems(&self) -> Vec<String> {
        let (client, living) = (&self.client, usize::from(self.spec.elements) - 1);
        let mut problems = Vec::new();
        let mut expect = |kept: bool, otherwise: String| {
            if !kept {
                problems.push(otherwise);
            }
        };
        expect(
            client.failures == 0 && client.requests > 0,
            format!("{} of {} requests failed", client.failures, client.requests),
        );
        let served = client.answers.len();
        expect(
            served == usize::from(self.spec.elements),
            format!("{served} of {} servers served", self.spec.elements),
        );
        let least = self.deaths.elements_min;
        expect(
            least >= living,
            format!(
                "with the registrar, {} elements were lost",
                living - least.min(living)
            ),
        );
        problems
    }

    /// Returns the report as text of several lines.
    pub fn text(&self) -> String {
        let (client, deaths) = (&self.client, &self.deaths);
        let answers = client.answers.iter();
        let answers: Vec<String> = answers
            .map(|(host, count)| format!("{host} {count}"))
            .collect();
        let living = usize::from(self.spec.elements) - 1;
        let rows = [
            ("requests", client.requests.to_string()),
            ("failures", client.failures.to_string()),
            ("elements tried in vain", client.retries.to_string()),
            ("longest request", format!("{:.2} s", client.longest_s)),
            ("answers", answers.join(", ")),
            (
                "a server's death: out of the pool",
                format!("after {:.2} s", deaths.element_s),
            ),
            (
                "a registrar's death: taken over",
                format!("after {:.2} s", deaths.registrar_s),
            ),
            (
                "elements listed meanwhile",
                format!("{} of {living}", deaths.elements_min),
            ),
            ("all in all", format!("{:.1} s", self.total_s)),
        ];
        let mut text: String = rows
            .map(|(name, value)| format!("{name:<36}{value}\n"))
            .concat();
        for problem in &self.problems {
            text += &format!("NOT AS PROMISED: {problem}\n");
        }
        if self.passed {
            text += "As promised: every request was answered.\n";
        }
        text
    }
}
