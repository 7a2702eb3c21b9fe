//! The loads: saturation, and the loads of paper 001 section 5.2.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};

use super::Encapsulation;
use super::measurement_windows::{
    MemberGroupSpec, RunningMemberGroup, WindowResult, WindowSchedule, measure_windows,
};
use super::member_group::{MemberKind, address_towards};
use super::messages::PoolMessages;
use super::report::RegistrarRow;
use super::scope::{RegistrarScope, RegistrarTarget, ScopeSpec};

/// Elements of the pool that users resolve.
const POOL_ELEMENTS: usize = 1000;
/// Scopes per round of a load in which small differences matter.
const SCOPE_STARTS: usize = 3;
/// Elements per answer by default.
const ITEMS_DEFAULT: usize = 3;

/// Load of a registrar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RegistrarLoad {
    /// Elements re-register as soon as they have their answer
    Reregistrations,
    /// Users resolve as soon as they have their answer, in a pool of 1,000 elements
    Resolutions,
    /// 2,000 elements re-register every 250 ms
    PaperElements,
    /// 1,000 users resolve every 100 ms, in a pool of 1,000 elements that re-register every second
    PaperUsers,
    /// 1,000 elements re-register every 250 ms, also without the single send to all peers
    PaperRegistrars,
}

impl RegistrarLoad {
    pub(super) const ALL: [RegistrarLoad; 5] = [
        RegistrarLoad::Reregistrations,
        RegistrarLoad::Resolutions,
        RegistrarLoad::PaperElements,
        RegistrarLoad::PaperUsers,
        RegistrarLoad::PaperRegistrars,
    ];
}

/// Settings shared by all loads.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadSettings {
    pub external: Option<RegistrarTarget>,
    pub carrier: Encapsulation,
    pub associations: usize,
    pub divide: usize,
    pub policy: PolicyKind,
    pub items: Option<u32>,
    pub pause_us: Option<u32>,
    pub windows: WindowSchedule,
}

/// Numbers of a load; an interval of 0 means saturation.
struct LoadPlan {
    name: String,
    elements: usize,
    /// Interval of re-registrations; `None` for a single registration.
    reregistration_interval: Option<Duration>,
    users: usize,
    resolution_interval: Duration,
}

fn interval_text(interval: Duration) -> String {
    match interval.as_millis() {
        0 => "as fast as they can".to_owned(),
        ms => format!("every {ms} ms"),
    }
}

impl LoadPlan {
    fn new(load: RegistrarLoad, setting: &LoadSettings) -> LoadPlan {
        let divided = |count: usize| (count / setting.divide).max(1);
        let ms = Duration::from_millis;
        let elements = |count: usize, interval: Duration| LoadPlan {
            name: format!("{count} elements {}", interval_text(interval)),
            elements: count,
            reregistration_interval: Some(interval),
            users: 0,
            resolution_interval: Duration::ZERO,
        };
        let users = |count: usize, interval, elements_every| LoadPlan {
            name: format!("{count} users {}", interval_text(interval)),
            elements: divided(POOL_ELEMENTS),
            reregistration_interval: elements_every,
            users: count,
            resolution_interval: interval,
        };
        match load {
            RegistrarLoad::Reregistrations => elements(setting.associations, Duration::ZERO),
            RegistrarLoad::Resolutions => users(setting.associations, Duration::ZERO, None),
            RegistrarLoad::PaperElements => elements(divided(2000), ms(250)),
            RegistrarLoad::PaperUsers => users(divided(1000), ms(100), Some(ms(1000))),
            RegistrarLoad::PaperRegistrars => elements(divided(1000), ms(250)),
        }
    }
}

impl LoadSettings {
    /// Returns the lengths of request and answer of the echoes to compare with.
    pub(super) fn echo_lengths(&self) -> Result<[(&'static str, (usize, usize)); 2]> {
        let address: IpAddr = match self.external {
            Some(target) => address_towards(target.server)?,
            None => [127, 0, 0, 1].into(),
        };
        let pool = PoolMessages {
            handle: PoolHandle::from(self.pool_handle(RegistrarLoad::Reregistrations).as_str()),
            policy: self.policy,
            items: self.items,
        };
        let items = self.items.map_or(ITEMS_DEFAULT, |items| items as usize);
        Ok([
            ("reregistration", pool.registration_lengths(address)?),
            ("resolution", pool.resolution_lengths(address, items)?),
        ])
    }

    /// Returns a separate pool handle for each load: a registrar of another program may remember an old pool.
    fn pool_handle(&self, load: RegistrarLoad) -> String {
        format!("bench-{}-{}", std::process::id(), load as u8)
    }

    /// Measures a load with the single send to all peers; a load about that send also without it, and with each
    /// re-registration announced.
    pub(super) fn measure(
        &self,
        load: RegistrarLoad,
        registrars: usize,
    ) -> Result<Vec<RegistrarRow>> {
        let plan = LoadPlan::new(load, self);
        eprintln!("{}, {registrars} registrars", plan.name);
        let row = |windows: &[_]| {
            RegistrarRow::from_windows(load, &plan.name, plan.elements, plan.users, windows)
        };
        if let Some(target) = self.external {
            let windows = self.measure_groups(load, &plan, &[target], None, self.windows)?;
            return Ok(vec![row(&windows)]);
        }
        let both = load == RegistrarLoad::PaperRegistrars && registrars > 1;
        let ways = [(true, false), (false, false), (true, true)];
        let ways = if both { &ways[..] } else { &ways[..1] };
        let each = ways.iter().map(|&(one_send, announce_each)| {
            let spec = ScopeSpec {
                registrars,
                one_send,
                announce_each,
                pause_us: self.pause_us,
                encapsulation: self.carrier,
            };
            let mut row = row(&self.measure_in_scopes(load, &plan, &spec)?);
            row.registrars = registrars;
            row.one_send = Some(one_send);
            row.announce_each = Some(announce_each);
            Ok(row)
        });
        each.collect()
    }

    /// Measures in one scope, or in several if small differences matter: the start of a scope decides how closely the
    /// elements' requests coincide, and with it how often the registrar wakes up.
    fn measure_in_scopes(
        &self,
        load: RegistrarLoad,
        plan: &LoadPlan,
        spec: &ScopeSpec,
    ) -> Result<Vec<WindowResult>> {
        let count = self.windows.count;
        let (starts, count) = match load {
            RegistrarLoad::PaperRegistrars => (count * SCOPE_STARTS, 1),
            _ => (1, count),
        };
        let windows = WindowSchedule {
            count,
            ..self.windows
        };
        let mut measured = Vec::new();
        for _ in 0..starts {
            let scope = RegistrarScope::start(spec)?;
            let targets: Vec<RegistrarTarget> = (0..spec.registrars.min(2))
                .filter_map(|place| scope.registrar_target(place))
                .collect();
            measured.extend(self.measure_groups(load, plan, &targets, Some(&scope), windows)?);
        }
        Ok(measured)
    }

    fn measure_groups(
        &self,
        load: RegistrarLoad,
        plan: &LoadPlan,
        targets: &[RegistrarTarget],
        scope: Option<&RegistrarScope>,
        windows: WindowSchedule,
    ) -> Result<Vec<WindowResult>> {
        let at = *targets.first().context("no registrar to measure")?;
        let handle = self.pool_handle(load);
        let spec = |kind, count| MemberGroupSpec {
            kind,
            count,
            registrar: at,
            handle: handle.clone(),
            policy: self.policy,
            items: self.items,
        };
        let mut elements = RunningMemberGroup::start(&spec(MemberKind::Elements, plan.elements))?;
        if let Some(scope) = scope {
            scope.wait_for_elements(plan.elements as u64)?;
        }
        let mut users = match plan.users {
            0 => None,
            count => Some(RunningMemberGroup::start(&spec(MemberKind::Users, count))?),
        };
        let mut groups = Vec::new();
        groups.extend(
            plan.reregistration_interval
                .map(|interval| (&mut elements, interval)),
        );
        groups.extend(
            users
                .as_mut()
                .map(|users| (users, plan.resolution_interval)),
        );
        let windows = measure_windows(&mut groups, targets, windows)?;
        if let Some(scope) = scope {
            let resolutions = users.as_ref().map_or(0, RunningMemberGroup::answered);
            scope.check_counters(elements.answered(), resolutions, 0)?;
        }
        users.map_or(Ok(()), RunningMemberGroup::deregister_and_close)?;
        elements.deregister_and_close()?;
        Ok(windows)
    }
}
