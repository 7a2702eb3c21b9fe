//! Groups at registrars, and the registrars' processor time under their load.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use holdfast_wire::rserpool::PolicyKind;

use super::group::{Counts, Kind};
use super::part;
use super::process::{Processors, Role};
use super::scope::Target;

/// Elements or users of one registrar.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// Kind of the members.
    pub kind: Kind,
    /// Number of members.
    pub count: usize,
    /// Registrar of the group.
    pub at: Target,
    /// Handle of the pool.
    pub handle: String,
    /// Policy of the pool.
    pub policy: PolicyKind,
    /// Elements requested per answer; by default the registrar's choice.
    pub items: Option<u32>,
}

/// A running group.
#[derive(Debug)]
pub struct Group {
    role: Role,
    kind: Kind,
    answered: u64,
}

/// Schedule of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Time from the start of the load to the first window.
    pub settle: Duration,
    /// Length of each window.
    pub length: Duration,
    /// Number of windows, one after the other.
    pub count: usize,
}

/// Result of one window.
#[derive(Clone, Debug)]
pub struct Window {
    /// Re-registrations answered per second.
    pub reregistrations_per_s: f64,
    /// Resolutions answered per second.
    pub resolutions_per_s: f64,
    /// Share of a processor that each target used.
    pub cpu: Vec<f64>,
    /// Share of a processor that all groups together used.
    pub groups_cpu: f64,
}

impl Window {
    /// Returns the operations of both kinds per second.
    #[must_use]
    pub fn operations_per_s(&self) -> f64 {
        self.reregistrations_per_s + self.resolutions_per_s
    }
}

impl Group {
    /// Starts a group; returns when all members are associated and elements are registered.
    ///
    /// # Errors
    /// The members find no registrar, or the registrar refuses them.
    pub fn start(spec: &GroupSpec) -> Result<Group> {
        let kind = spec.kind.to_possible_value().context("a kind's name")?;
        let mut command = part("group")?;
        command.args(["--kind", kind.get_name()]);
        for (flag, value) in [
            ("--count", spec.count.to_string()),
            ("--server", spec.at.server.to_string()),
            ("--encapsulation", spec.at.encapsulation.to_string()),
            ("--processor", Processors::allowed()?.others.to_string()),
            ("--handle", spec.handle.clone()),
            ("--policy", spec.policy.name().to_owned()),
        ] {
            command.arg(flag).arg(value);
        }
        if let Some(items) = spec.items {
            command.arg("--items").arg(items.to_string());
        }
        let mut role = Role::start(command)?;
        let said = role.line()?;
        ensure!(said.trim() == "ready", "a group said: {said}");
        let kind = spec.kind;
        Ok(Group {
            role,
            kind,
            answered: 0,
        })
    }

    fn ask(&mut self, line: &str) -> Result<Counts> {
        Ok(serde_json::from_str(&self.role.ask(line)?)?)
    }

    /// Returns the requests answered at the last stop, without the first registrations.
    #[must_use]
    pub fn answered(&self) -> u64 {
        self.answered
    }

    /// Deregisters the elements, waits for the responses, and ends all associations.
    ///
    /// # Errors
    /// An answer is missing.
    pub fn leave(mut self) -> Result<()> {
        self.ask("leave")?;
        self.role.end()
    }
}

/// Lets all groups send requests at their intervals (0: each after its answer), and measures. No request is outstanding
/// at the end.
///
/// # Errors
/// A request has no answer or an invalid one.
pub fn measure(
    groups: &mut [(&mut Group, Duration)],
    targets: &[Target],
    windows: Windows,
) -> Result<Vec<Window>> {
    for (group, interval) in groups.iter_mut() {
        group.ask(&format!("go {}", interval.as_micros()))?;
    }
    sleep(windows.settle);
    let mut measured = Vec::new();
    let mut before = Mark::take(groups, targets)?;
    for _ in 0..windows.count {
        sleep(windows.length);
        let after = Mark::take(groups, targets)?;
        measured.push(before.until(&after));
        before = after;
    }
    for (group, _) in groups.iter_mut() {
        let counts = group.ask("stop")?;
        ensure!(
            counts.sent == counts.answered,
            "{} requests, but {} answers",
            counts.sent,
            counts.answered
        );
        group.answered = counts.answered;
    }
    Ok(measured)
}

/// Clocks and counters at one moment.
struct Mark {
    /// Time, kind and number of answers of each group.
    answered: Vec<(Instant, Kind, u64)>,
    cpu: Vec<(Instant, Duration)>,
    groups_cpu: (Instant, Duration),
}

impl Mark {
    fn take(groups: &mut [(&mut Group, Duration)], targets: &[Target]) -> Result<Mark> {
        let mut answered = Vec::new();
        for (group, _) in groups.iter_mut() {
            let counts = group.ask("count")?;
            answered.push((Instant::now(), group.kind, counts.answered));
        }
        let clock = |target: &Target| Ok((Instant::now(), target.cpu_time()?));
        let of_groups = groups.iter().map(|(group, _)| group.role.cpu_time());
        Ok(Mark {
            answered,
            cpu: targets.iter().map(clock).collect::<Result<_>>()?,
            groups_cpu: (Instant::now(), of_groups.sum::<Result<_>>()?),
        })
    }

    fn until(&self, after: &Mark) -> Window {
        let rate = |wanted: Kind| {
            let pairs = self.answered.iter().zip(&after.answered);
            pairs
                .filter(|(_, after)| after.1 == wanted)
                .map(|(before, after)| {
                    (after.2 - before.2) as f64 / (after.0 - before.0).as_secs_f64()
                })
                .sum()
        };
        let pairs = self.cpu.iter().zip(&after.cpu);
        let share = |(before, after): (&(Instant, Duration), &(Instant, Duration))| {
            (after.1 - before.1).as_secs_f64() / (after.0 - before.0).as_secs_f64()
        };
        Window {
            reregistrations_per_s: rate(Kind::Elements),
            resolutions_per_s: rate(Kind::Users),
            cpu: pairs.map(share).collect(),
            groups_cpu: share((&self.groups_cpu, &after.groups_cpu)),
        }
    }
}
