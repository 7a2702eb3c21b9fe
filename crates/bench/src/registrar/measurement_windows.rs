//! Groups at registrars, and the registrars' processor time under their load.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use holdfast_wire::rserpool::PolicyKind;

use super::hidden_command;
use super::member_group::{MemberKind, RequestCounts};
use super::role_process::{BenchProcessors, RoleProcess};
use super::scope::RegistrarTarget;

/// Elements or users of one registrar.
#[derive(Clone, Debug)]
pub struct MemberGroupSpec {
    /// Kind of the members.
    pub kind: MemberKind,
    /// Number of members.
    pub count: usize,
    /// Registrar of the group.
    pub registrar: RegistrarTarget,
    /// Handle of the pool.
    pub handle: String,
    /// Policy of the pool.
    pub policy: PolicyKind,
    /// Elements requested per answer; by default the registrar's choice.
    pub items: Option<u32>,
}

/// A running process with the elements or users of one registrar.
#[derive(Debug)]
pub struct RunningMemberGroup {
    role: RoleProcess,
    kind: MemberKind,
    answered: u64,
}

/// Schedule of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct WindowSchedule {
    /// Time from the start of the load to the first window.
    pub settle: Duration,
    /// Length of each window.
    pub length: Duration,
    /// Number of windows, one after the other.
    pub count: usize,
}

/// Result of one window.
#[derive(Clone, Debug)]
pub struct WindowResult {
    /// Re-registrations answered per second.
    pub reregistrations_per_s: f64,
    /// Resolutions answered per second.
    pub resolutions_per_s: f64,
    /// Share of a processor that each target used.
    pub target_cpu_shares: Vec<f64>,
    /// Share of a processor that all groups together used.
    pub groups_cpu_share: f64,
}

impl WindowResult {
    /// Returns the operations of both kinds per second.
    #[must_use]
    pub fn operations_per_s(&self) -> f64 {
        self.reregistrations_per_s + self.resolutions_per_s
    }
}

impl RunningMemberGroup {
    /// Starts a group; returns when all members are associated and elements are registered.
    ///
    /// # Errors
    /// The members find no registrar, or the registrar refuses them.
    pub fn start(spec: &MemberGroupSpec) -> Result<RunningMemberGroup> {
        let kind = spec
            .kind
            .to_possible_value()
            .context("the kind of member has no name")?;
        let mut command = hidden_command("group")?;
        command.args(["--kind", kind.get_name()]);
        for (flag, value) in [
            ("--count", spec.count.to_string()),
            ("--server", spec.registrar.server.to_string()),
            ("--encapsulation", spec.registrar.encapsulation.to_string()),
            (
                "--processor",
                BenchProcessors::allowed()?.others.to_string(),
            ),
            ("--handle", spec.handle.clone()),
            ("--policy", spec.policy.name().to_owned()),
        ] {
            command.arg(flag).arg(value);
        }
        if let Some(items) = spec.items {
            command.arg("--items").arg(items.to_string());
        }
        let mut role = RoleProcess::start(command)?;
        let said = role.read_line()?;
        ensure!(
            said.trim() == "ready",
            "a group printed {said:?} instead of `ready`"
        );
        let kind = spec.kind;
        Ok(RunningMemberGroup {
            role,
            kind,
            answered: 0,
        })
    }

    fn send_command(&mut self, line: &str) -> Result<RequestCounts> {
        Ok(serde_json::from_str(&self.role.send_line(line)?)?)
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
    pub fn deregister_and_close(mut self) -> Result<()> {
        self.send_command("leave")?;
        self.role.end()
    }
}

/// Lets all groups send requests at their intervals (0: each after its answer), and measures. No request is outstanding
/// at the end.
///
/// # Errors
/// A request has no answer or an invalid one.
pub fn measure_windows(
    groups: &mut [(&mut RunningMemberGroup, Duration)],
    targets: &[RegistrarTarget],
    windows: WindowSchedule,
) -> Result<Vec<WindowResult>> {
    for (group, interval) in groups.iter_mut() {
        group.send_command(&format!("go {}", interval.as_micros()))?;
    }
    sleep(windows.settle);
    let mut measured = Vec::new();
    let mut before = CounterSample::read_counters(groups, targets)?;
    for _ in 0..windows.count {
        sleep(windows.length);
        let after = CounterSample::read_counters(groups, targets)?;
        measured.push(before.window_until(&after));
        before = after;
    }
    for (group, _) in groups.iter_mut() {
        let counts = group.send_command("stop")?;
        ensure!(
            counts.sent == counts.answered,
            "a group sent {} requests, but received {} answers",
            counts.sent,
            counts.answered
        );
        group.answered = counts.answered;
    }
    Ok(measured)
}

/// Clocks and counters at one moment.
struct CounterSample {
    /// Time, kind and number of answers of each group.
    answered: Vec<(Instant, MemberKind, u64)>,
    cpu: Vec<(Instant, Duration)>,
    groups_cpu: (Instant, Duration),
}

impl CounterSample {
    fn read_counters(
        groups: &mut [(&mut RunningMemberGroup, Duration)],
        targets: &[RegistrarTarget],
    ) -> Result<CounterSample> {
        let mut answered = Vec::new();
        for (group, _) in groups.iter_mut() {
            let counts = group.send_command("count")?;
            answered.push((Instant::now(), group.kind, counts.answered));
        }
        let clock = |target: &RegistrarTarget| Ok((Instant::now(), target.cpu_time()?));
        let of_groups = groups.iter().map(|(group, _)| group.role.cpu_time());
        Ok(CounterSample {
            answered,
            cpu: targets.iter().map(clock).collect::<Result<_>>()?,
            groups_cpu: (Instant::now(), of_groups.sum::<Result<_>>()?),
        })
    }

    fn window_until(&self, after: &CounterSample) -> WindowResult {
        let rate = |wanted: MemberKind| {
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
        WindowResult {
            reregistrations_per_s: rate(MemberKind::Elements),
            resolutions_per_s: rate(MemberKind::Users),
            target_cpu_shares: pairs.map(share).collect(),
            groups_cpu_share: share((&self.groups_cpu, &after.groups_cpu)),
        }
    }
}
