//! Section 5.2: registrars in processes of their own, and the CPU utilisation of the first two.

use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_wire::rserpool::PolicyKind;

use crate::registrar::measurement_windows::{
    MemberGroupSpec, RunningMemberGroup, WindowSchedule, measure_windows,
};
use crate::registrar::scope::{RegistrarScope, RegistrarTarget, ScopeSpec};
use crate::registrar::{Encapsulation, MemberKind};
use crate::repro::{Estimate, ExperimentOutcome, ExperimentSettings, Figure, Panel, Point, Series};

/// Elements of a pool with a constant size.
pub(super) const ELEMENTS: u32 = 1000;
/// Default duration of each repeat, milliseconds.
const REPEAT_MS_DEFAULT: u64 = 300;
/// Time for associations and timers to reach a steady state.
const SETTLE_TIME: Duration = Duration::from_millis(200);

/// Registrars of one scope, and the groups that load them.
pub(super) struct RegistrarBench {
    // Groups end before the registrars: otherwise, registrars would send keep-alives to elements that have ended.
    groups: Vec<(RunningMemberGroup, MemberKind)>,
    targets: Vec<RegistrarTarget>,
    scope: RegistrarScope,
    /// Registrar of the users, counted from 0.
    users_registrar: usize,
    windows: WindowSchedule,
}

impl RegistrarBench {
    pub(super) fn start(
        settings: &ExperimentSettings,
        registrars: usize,
    ) -> Result<RegistrarBench> {
        let scope = RegistrarScope::start(&ScopeSpec {
            // The paper's registrars announce each re-registration.
            announce_each: true,
            registrars,
            one_send: true,
            pause_us: None,
            encapsulation: Encapsulation::choose(false),
        })?;
        let targets = (0..registrars.min(2)).filter_map(|place| scope.registrar_target(place));
        Ok(RegistrarBench {
            groups: Vec::new(),
            targets: targets.collect(),
            scope,
            users_registrar: 0,
            windows: window_schedule(settings),
        })
    }

    /// Adds a group at the first or second registrar, counted from 0.
    pub(super) fn add_group(
        &mut self,
        kind: MemberKind,
        count: u32,
        at: usize,
        policy: PolicyKind,
    ) -> Result<()> {
        let target = self.targets.get(at).context("no such registrar")?;
        let group = RunningMemberGroup::start(&MemberGroupSpec {
            kind,
            count: count as usize,
            registrar: *target,
            handle: "repro".to_owned(),
            policy,
            items: None,
        })?;
        self.groups.push((group, kind));
        match kind {
            MemberKind::Elements => self.scope.wait_for_elements(count.into())?,
            MemberKind::Users => self.users_registrar = at,
        }
        Ok(())
    }

    /// Adds a point at `x` to each registrar's curve for each interval. `request_intervals` returns the request intervals of
    /// elements and users, `paper` the paper's value for a registrar, counted from 1. `of` is a part of the curves'
    /// names.
    pub(super) fn add_points(
        &mut self,
        intervals_ms: &[u64],
        request_intervals: impl Fn(Duration) -> (Duration, Duration),
        (x, of): (u32, &str),
        paper: impl Fn(usize, u64) -> Option<f64>,
        series: &mut Vec<Series>,
    ) -> Result<()> {
        for &interval in intervals_ms {
            let (elements, users) = request_intervals(Duration::from_millis(interval));
            for (place, ours) in (1..).zip(self.measure(elements, users)?) {
                let name = format!("registrar #{place}{of}, every {interval} ms");
                let point = Point {
                    x: x.into(),
                    ours,
                    paper: paper(place, interval),
                };
                push_point(series, &name, point);
            }
        }
        Ok(())
    }

    /// Returns the share of a core that the first and the second registrar use, in percent, while each element and user
    /// sends one request per interval.
    fn measure(&mut self, elements: Duration, users: Duration) -> Result<Vec<Estimate>> {
        let interval = |kind: MemberKind| match kind {
            MemberKind::Elements => elements,
            MemberKind::Users => users,
        };
        let groups = self.groups.iter_mut();
        let mut groups: Vec<_> = groups
            .map(|(group, kind)| (group, interval(*kind)))
            .collect();
        let measured = measure_windows(&mut groups, &self.targets, self.windows)?;
        let answered = |wanted: MemberKind| -> u64 {
            let of_kind = self.groups.iter().filter(|(_, kind)| *kind == wanted);
            of_kind.map(|(group, _)| group.answered()).sum()
        };
        self.scope.check_counters(
            answered(MemberKind::Elements),
            answered(MemberKind::Users),
            self.users_registrar,
        )?;
        let of_target = |target: usize| {
            let shares = measured
                .iter()
                .map(|window| window.target_cpu_shares[target] * 100.0);
            Estimate::from_repeats(&shares.collect::<Vec<_>>())
        };
        Ok((0..self.targets.len()).map(of_target).collect())
    }
}

fn window_schedule(settings: &ExperimentSettings) -> WindowSchedule {
    WindowSchedule {
        settle: SETTLE_TIME,
        length: Duration::from_millis(settings.milliseconds.unwrap_or(REPEAT_MS_DEFAULT)),
        count: settings.repeats_or(super::REPEATS) as usize,
    }
}

/// Returns the notes that a reader of the numbers needs.
fn notes(settings: &ExperimentSettings) -> Vec<String> {
    let WindowSchedule { length, count, .. } = window_schedule(settings);
    vec![
        format!(
            "{count} repeats of {} ms each (--repeats, --milliseconds), one after the other with the same associations;",
            length.as_millis()
        ),
        format!(
            "the measured registrar alone on its processor, everything else on another, SCTP {} on loopback.",
            match Encapsulation::choose(false) {
                Encapsulation::Ip => "of the kernel",
                Encapsulation::Udp => "of libusrsctp inside UDP",
            }
        ),
        "The paper's registrars had a 1.3 GHz Athlon (2001) and the kernel's SCTP of Linux 2.6.17."
            .to_owned(),
    ]
}

/// Returns the paper's value for a point, by the point's key.
pub(super) fn paper_value<K: PartialEq>(table: &[(K, f64)], point: &K) -> Option<f64> {
    let found = table.iter().find(|(stated, _)| stated == point);
    found.map(|&(_, percent)| percent)
}

/// Returns a panel of utilisations.
pub(super) fn utilisation_panel(title: impl Into<String>, x: &str, series: Vec<Series>) -> Panel {
    Panel {
        title: title.into(),
        x: x.to_owned(),
        y: "CPU utilisation".to_owned(),
        unit: "% of a core".to_owned(),
        y_log: false,
        series,
    }
}

/// Returns the outcome of an experiment that draws one figure, with these panels.
pub(super) fn figure_outcome(
    settings: &ExperimentSettings,
    title: &str,
    panels: Vec<Panel>,
) -> ExperimentOutcome {
    let title = title.to_owned();
    ExperimentOutcome::from_figure(Figure { title, panels }, notes(settings))
}

/// Adds a point to the curve of that name, and creates the curve if needed.
fn push_point(series: &mut Vec<Series>, name: &str, point: Point) {
    match series.iter_mut().find(|each| each.name == name) {
        Some(each) => each.points.push(point),
        None => series.push(Series {
            name: name.to_owned(),
            points: vec![point],
        }),
    }
}
