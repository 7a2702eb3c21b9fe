//! Rows, their comparison with the echo, and the bars.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use super::echo::EchoRow;
use super::loads::RegistrarLoad;
use super::measurement_windows::WindowResult;
use holdfast_testbed::stats::Quantiles;

/// Result of one load with one number of registrars.
#[derive(Clone, Debug, Serialize)]
pub struct RegistrarRow {
    /// Text that describes the load.
    pub load: String,
    #[serde(skip)]
    load_kind: RegistrarLoad,
    /// Registrars in the scope.
    pub registrars: usize,
    /// Elements at the first registrar.
    pub elements: usize,
    /// Users at the first registrar.
    pub users: usize,
    /// Re-registrations answered per second; like all values below, the median of the rounds.
    pub reregistrations_per_s: f64,
    /// Resolutions answered per second.
    pub resolutions_per_s: f64,
    /// Share of a processor that the first registrar used.
    pub cpu_share: f64,
    /// Share of a processor that the second registrar used, which only synchronises.
    pub sync_registrar_cpu_share: Option<f64>,
    /// Share of another processor that the elements and users used: near 1, the load generators are the limit.
    pub groups_cpu_share: f64,
    /// True if updates were handed over once for all peers; unknown of another program's registrar.
    pub one_send: Option<bool>,
    /// True if each re-registration without a change was announced, instead of several together; unknown of another
    /// program's registrar.
    pub announce_each: Option<bool>,
    /// Processor time of the first registrar per operation, nanoseconds.
    pub cpu_ns_per_operation: f64,
    /// Processor time per operation minus the echo's, nanoseconds; only with one registrar at saturation.
    pub own_ns_per_operation: Option<f64>,
    /// Operations per second divided by the echo's; only with one registrar at saturation.
    pub share_of_echo: Option<f64>,
    /// Least and largest value of the rounds.
    pub operations_per_s_range: [f64; 2],
    /// Least and largest value of the rounds.
    pub cpu_share_range: [f64; 2],
}

fn median(windows: &[WindowResult], value: impl Fn(&WindowResult) -> f64) -> f64 {
    Quantiles::new(windows.iter().map(value).collect()).median()
}

fn value_range(windows: &[WindowResult], value: impl Fn(&WindowResult) -> f64) -> [f64; 2] {
    let quantiles = Quantiles::new(windows.iter().map(value).collect());
    [quantiles.quantile(0.0), quantiles.quantile(1.0)]
}

impl RegistrarRow {
    pub(super) fn from_windows(
        which: RegistrarLoad,
        name: &str,
        elements: usize,
        users: usize,
        windows: &[WindowResult],
    ) -> RegistrarRow {
        let of_first =
            |window: &WindowResult| window.target_cpu_shares.first().copied().unwrap_or(0.0);
        let of_second =
            |window: &WindowResult| window.target_cpu_shares.get(1).copied().unwrap_or(0.0);
        let has_second = windows
            .iter()
            .all(|window| window.target_cpu_shares.len() > 1);
        let each = |window: &WindowResult| of_first(window) * 1e9 / window.operations_per_s();
        RegistrarRow {
            load: name.to_owned(),
            load_kind: which,
            registrars: 1,
            elements,
            users,
            reregistrations_per_s: median(windows, |window| window.reregistrations_per_s),
            resolutions_per_s: median(windows, |window| window.resolutions_per_s),
            cpu_share: median(windows, of_first),
            sync_registrar_cpu_share: has_second.then(|| median(windows, of_second)),
            groups_cpu_share: median(windows, |window| window.groups_cpu_share),
            one_send: None,
            announce_each: None,
            cpu_ns_per_operation: median(windows, each),
            own_ns_per_operation: None,
            share_of_echo: None,
            operations_per_s_range: value_range(windows, WindowResult::operations_per_s),
            cpu_share_range: value_range(windows, of_first),
        }
    }

    fn operations_per_s(&self) -> f64 {
        self.reregistrations_per_s + self.resolutions_per_s
    }
}

/// All results of `holdfast bench registrar`.
#[derive(Debug, Serialize)]
pub(super) struct RegistrarReport {
    bench: &'static str,
    transport: &'static str,
    echo: Vec<EchoResults>,
    rows: Vec<RegistrarRow>,
}

/// Results of the echo with the messages of one operation.
#[derive(Debug, Serialize)]
struct EchoResults {
    operation: &'static str,
    /// Medians of the rounds.
    operations_per_s: f64,
    server_cpu_ns: f64,
    rounds: Vec<EchoRow>,
}

impl RegistrarReport {
    pub(super) fn new(transport: &'static str) -> RegistrarReport {
        RegistrarReport {
            bench: "registrar",
            transport,
            echo: Vec::new(),
            rows: Vec::new(),
        }
    }

    pub(super) fn add_echo(&mut self, operation: &'static str, rounds: Vec<EchoRow>) {
        let of = |value: fn(&EchoRow) -> f64| Quantiles::new(rounds.iter().map(value).collect());
        let rates = of(|row| row.operations_per_s);
        let times = of(|row| row.server_cpu_ns);
        let share = of(|row| row.server_cpu_share).median();
        let (request, response) = rounds
            .first()
            .map_or((0, 0), |row| (row.load.request_len, row.load.response_len));
        println!(
            "echo of a {operation} ({request} and {response} bytes) over {}: {:.0}/s ({:.0} to {:.0}), {:.0} ns of \
             CPU time each, {:.0} % busy",
            self.transport,
            rates.median(),
            rates.quantile(0.0),
            rates.quantile(1.0),
            times.median(),
            share * 100.0
        );
        self.echo.push(EchoResults {
            operation,
            operations_per_s: rates.median(),
            server_cpu_ns: times.median(),
            rounds,
        });
    }

    pub(super) fn add_row(&mut self, mut row: RegistrarRow) {
        if self.rows.is_empty() {
            println!("{}", heading());
        }
        let operation = match row.load_kind {
            RegistrarLoad::Reregistrations => "reregistration",
            RegistrarLoad::Resolutions => "resolution",
            _ => "",
        };
        let echo = self.echo.iter().find(|echo| echo.operation == operation);
        if let (Some(echo), 1) = (echo, row.registrars) {
            row.own_ns_per_operation = Some(row.cpu_ns_per_operation - echo.server_cpu_ns);
            row.share_of_echo = Some(row.operations_per_s() / echo.operations_per_s);
        }
        println!("{}", row_line(&row));
        self.rows.push(row);
    }

    /// Prints the project's bars that this run meets or misses.
    pub(super) fn print_targets(&self) {
        let mut bars = Vec::new();
        for row in &self.rows {
            bars.extend(targets_of_row(row));
        }
        bars.extend(self.growth_targets());
        for (what, met) in bars {
            println!("{} {what}", if met { "met:   " } else { "missed:" });
        }
        if let Some((load, growth)) = self.growth_of_cpu_time(true, true) {
            let percent = growth * 100.0;
            println!(
                "no target: {load}, from 1 to 6 registrars, each re-registration announced: {percent:+.0} % CPU"
            );
        }
    }

    /// Compares the processor time of one registrar with the time of six, with and without the single send to all
    /// peers.
    fn growth_targets(&self) -> Vec<(String, bool)> {
        let ways = [(true, "with"), (false, "without")];
        let each = ways.into_iter().filter_map(|(one_send, how)| {
            let (load, growth) = self.growth_of_cpu_time(one_send, false)?;
            let percent = growth * 100.0;
            let what = format!(
                "{load}, from 1 to 6 registrars {how} the single send to all peers: {percent:+.0} % CPU (at most 25 %)"
            );
            Some((what, growth <= 0.25))
        });
        each.collect()
    }

    fn growth_of_cpu_time(&self, one_send: bool, announce_each: bool) -> Option<(&str, f64)> {
        let find = |registrars, one_send, announce_each| {
            self.rows.iter().find(|row| {
                row.load_kind == RegistrarLoad::PaperRegistrars
                    && row.registrars == registrars
                    && row.one_send == Some(one_send)
                    && row.announce_each == Some(announce_each)
            })
        };
        let (alone, six) = (find(1, true, false)?, find(6, one_send, announce_each)?);
        Some((&six.load, six.cpu_share / alone.cpu_share - 1.0))
    }

    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
    }
}

fn targets_of_row(row: &RegistrarRow) -> Vec<(String, bool)> {
    let mut bars = Vec::new();
    let rate = row.operations_per_s();
    let least = match row.load_kind {
        RegistrarLoad::Reregistrations => Some(80_000.0),
        RegistrarLoad::Resolutions => Some(100_000.0),
        _ => None,
    };
    if let (Some(least), Some(share), Some(own)) =
        (least, row.share_of_echo, row.own_ns_per_operation)
    {
        let name = &row.load;
        bars.push((
            format!("{name}: {rate:.0}/s (at least {least:.0})"),
            rate >= least,
        ));
        let percent = share * 100.0;
        let text = format!("{name}: {percent:.0} % of the echo (at least 70 %)");
        bars.push((text, share >= 0.7));
        let text = format!("{name}: {own:.0} ns per request more than the echo (at most 2000)");
        bars.push((text, own <= 2000.0));
    }
    if least.is_none() {
        let percent = row.cpu_share * 100.0;
        let text = format!(
            "{}, {} registrars: {percent:.1} % of a processor (under 10 %)",
            row.load, row.registrars
        );
        bars.push((text, row.cpu_share < 0.1));
        if let Some(share) = row.sync_registrar_cpu_share {
            let text = format!(
                "{}, {} registrars: {:.1} % of a processor for one that only synchronises (under 5 %)",
                row.load,
                row.registrars,
                share * 100.0
            );
            bars.push((text, share < 0.05));
        }
    }
    bars
}

fn heading() -> String {
    format!(
        "{:<36} {:>10} {:>9} {:>20} {:>8} {:>14} {:>8} {:>8} {:>9} {:>9} {:>9}",
        "load",
        "registrars",
        "per s",
        "(range)",
        "CPU %",
        "(range)",
        "sync %",
        "load %",
        "ns each",
        "one send",
        "announced"
    )
}

fn row_line(row: &RegistrarRow) -> String {
    let percent = |share: f64| format!("{:.1}", share * 100.0);
    let [least, most] = row.operations_per_s_range;
    let [low, high] = row.cpu_share_range;
    format!(
        "{:<36} {:>10} {:>9.0} {:>20} {:>8} {:>14} {:>8} {:>8} {:>9.0} {:>9} {:>9}",
        row.load,
        row.registrars,
        row.operations_per_s(),
        format!("({least:.0} to {most:.0})"),
        percent(row.cpu_share),
        format!("({} to {})", percent(low), percent(high)),
        row.sync_registrar_cpu_share.map_or("-".to_owned(), percent),
        percent(row.groups_cpu_share),
        row.cpu_ns_per_operation,
        match row.one_send {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        },
        match row.announce_each {
            Some(true) => "each",
            Some(false) => "together",
            None => "-",
        },
    )
}
