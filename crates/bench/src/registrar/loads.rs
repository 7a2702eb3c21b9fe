//! The loads: saturation, and the loads of paper 001 section 5.2.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};

use super::Carrier;
use super::group::{Kind, address_towards};
use super::measure::{Group, GroupSpec, Window, Windows, measure};
use super::messages::Pool;
use super::report::Row;
use super::scope::{Scope, ScopeSpec, Target};

/// Elements of the pool that users resolve.
const POOL: usize = 1000;
/// Scopes per round of a load in which small differences matter.
const STARTS: usize = 3;
/// Elements per answer by default.
const ITEMS: usize = 3;

/// Load of a registrar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Load {
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

impl Load {
    pub(super) const ALL: [Load; 5] = [
        Load::Reregistrations,
        Load::Resolutions,
        Load::PaperElements,
        Load::PaperUsers,
        Load::PaperRegistrars,
    ];
}

/// Settings shared by all loads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub external: Option<Target>,
    pub carrier: Carrier,
    pub associations: usize,
    pub divide: usize,
    pub policy: PolicyKind,
    pub items: Option<u32>,
    pub pause_us: Option<u32>,
    pub windows: Windows,
}

/// Numbers of a load; an interval of 0 means saturation.
struct Plan {
    name: String,
    elements: usize,
    /// Interval of re-registrations; `None` for a single registration.
    elements_every: Option<Duration>,
    users: usize,
    users_every: Duration,
}

fn every(interval: Duration) -> String {
    match interval.as_millis() {
        0 => "as fast as they can".to_owned(),
        ms => format!("every {ms} ms"),
    }
}

impl Plan {
    fn of(load: Load, setting: &Setting) -> Plan {
        let part = |count: usize| (count / setting.divide).max(1);
        let ms = Duration::from_millis;
        let elements = |count: usize, interval: Duration| Plan {
            name: format!("{count} elements {}", every(interval)),
            elements: count,
            elements_every: Some(interval),
            users: 0,
            users_every: Duration::ZERO,
        };
        let users = |count: usize, interval, elements_every| Plan {
            name: format!("{count} users {}", every(interval)),
            elements: part(POOL),
            elements_every,
            users: count,
            users_every: interval,
        };
        match load {
            Load::Reregistrations => elements(setting.associations, Duration::ZERO),
            Load::Resolutions => users(setting.associations, Duration::ZERO, None),
            Load::PaperElements => elements(part(2000), ms(250)),
            Load::PaperUsers => users(part(1000), ms(100), Some(ms(1000))),
            Load::PaperRegistrars => elements(part(1000), ms(250)),
        }
    }
}

impl Setting {
    /// Returns the lengths of request and answer of the echoes to compare with.
    pub(super) fn echoes(&self) -> Result<[(&'static str, (usize, usize)); 2]> {
        let address: IpAddr = match self.external {
            Some(target) => address_towards(target.server)?,
            None => [127, 0, 0, 1].into(),
        };
        let pool = Pool {
            handle: PoolHandle::from(self.handle(Load::Reregistrations).as_str()),
            policy: self.policy,
            items: self.items,
        };
        let items = self.items.map_or(ITEMS, |items| items as usize);
        Ok([
            ("reregistration", pool.registration_lengths(address)?),
            ("resolution", pool.resolution_lengths(address, items)?),
        ])
    }

    /// Returns a separate pool handle for each load: a registrar of another program may remember an old pool.
    fn handle(&self, load: Load) -> String {
        format!("bench-{}-{}", std::process::id(), load as u8)
    }

    /// Measures a load with the single send to all peers; a load about that send also without it, and with each
    /// re-registration announced.
    pub(super) fn measure(&self, load: Load, registrars: usize) -> Result<Vec<Row>> {
        let plan = Plan::of(load, self);
        eprintln!("{}, {registrars} in scope", plan.name);
        let row = |windows: &[_]| Row::of(load, &plan.name, plan.elements, plan.users, windows);
        if let Some(target) = self.external {
            let windows = self.one(load, &plan, &[target], None, self.windows)?;
            return Ok(vec![row(&windows)]);
        }
        let both = load == Load::PaperRegistrars && registrars > 1;
        let ways = [(true, false), (false, false), (true, true)];
        let ways = if both { &ways[..] } else { &ways[..1] };
        let each = ways.iter().map(|&(one_send, announce_each)| {
            let spec = ScopeSpec {
                registrars,
                one_send,
                announce_each,
                pause_us: self.pause_us,
                carrier: self.carrier,
            };
            let mut row = row(&self.scopes(load, &plan, &spec)?);
            row.registrars = registrars;
            row.one_send = Some(one_send);
            row.announce_each = Some(announce_each);
            Ok(row)
        });
        each.collect()
    }

    /// Measures in one scope, or in several if small differences matter: the start of a scope decides how closely the
    /// elements' requests coincide, and with it how often the registrar wakes up.
    fn scopes(&self, load: Load, plan: &Plan, spec: &ScopeSpec) -> Result<Vec<Window>> {
        let count = self.windows.count;
        let (starts, count) = match load {
            Load::PaperRegistrars => (count * STARTS, 1),
            _ => (1, count),
        };
        let windows = Windows {
            count,
            ..self.windows
        };
        let mut measured = Vec::new();
        for _ in 0..starts {
            let scope = Scope::start(spec)?;
            let targets: Vec<Target> = (0..spec.registrars.min(2))
                .filter_map(|place| scope.target(place))
                .collect();
            measured.extend(self.one(load, plan, &targets, Some(&scope), windows)?);
        }
        Ok(measured)
    }

    fn one(
        &self,
        load: Load,
        plan: &Plan,
        targets: &[Target],
        scope: Option<&Scope>,
        windows: Windows,
    ) -> Result<Vec<Window>> {
        let at = *targets.first().context("no registrar")?;
        let handle = self.handle(load);
        let spec = |kind, count| GroupSpec {
            kind,
            count,
            at,
            handle: handle.clone(),
            policy: self.policy,
            items: self.items,
        };
        let mut elements = Group::start(&spec(Kind::Elements, plan.elements))?;
        if let Some(scope) = scope {
            scope.in_step(plan.elements as u64)?;
        }
        let mut users = match plan.users {
            0 => None,
            count => Some(Group::start(&spec(Kind::Users, count))?),
        };
        let mut groups = Vec::new();
        groups.extend(
            plan.elements_every
                .map(|interval| (&mut elements, interval)),
        );
        groups.extend(users.as_mut().map(|users| (users, plan.users_every)));
        let windows = measure(&mut groups, targets, windows)?;
        if let Some(scope) = scope {
            let resolutions = users.as_ref().map_or(0, Group::answered);
            scope.has_counted(elements.answered(), resolutions, 0)?;
        }
        users.map_or(Ok(()), Group::leave)?;
        elements.leave()?;
        Ok(windows)
    }
}
