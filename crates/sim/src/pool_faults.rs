//! Safety tests by simulation: random faults, then calm; after every schedule all invariants must hold.

use crate::Violation;
use crate::pools::{
    ElementChoice, Invariants, PoolAction, PoolBug, PoolRunConfig, Workload, ZoneConfig, try_run,
};
use crate::random::Random;
use crate::shrink::shrink_plan;
use crate::time::Time;
use crate::zone_network::LinkProperties;
use std::time::Duration;

/// Duration of the faults, and time until all must be well, in seconds.
const FAULTS_S: f64 = 40.0;
const RECOVERY_S: f64 = 70.0;

/// Simulates a random schedule of faults drawn from the seed.
///
/// # Errors
/// The first violated invariant.
pub fn try_seed(seed: u64) -> Result<(), Violation> {
    try_config(&draw_run_config(seed), seed)
}

/// Simulates the schedule with a deliberate bug in the state machines' messages or timers.
///
/// # Errors
/// The violated invariant that reveals the bug.
pub fn try_bug(seed: u64, bug: PoolBug) -> Result<(), Violation> {
    let config = PoolRunConfig {
        bug: Some(bug),
        ..draw_run_config(seed)
    };
    try_config(&config, seed)
}

fn try_config(config: &PoolRunConfig, seed: u64) -> Result<(), Violation> {
    try_run(config, seed).map(|_| ())
}

/// Returns the shortest part of a failing seed's faults, before all is repaired, that still fails. None if the seed
/// does not fail.
#[must_use]
pub fn shrink(seed: u64, bug: Option<PoolBug>) -> Option<(Vec<(Time, PoolAction)>, Violation)> {
    let config = PoolRunConfig {
        bug,
        ..draw_run_config(seed)
    };
    let faults_end = Time::from_secs_f64(FAULTS_S);
    let (storm, mending): (Vec<_>, Vec<_>) =
        config.plan.iter().partition(|(at, _)| *at < faults_end);
    let fails = |plan: &[(Time, PoolAction)]| {
        let plan = [plan, &mending].concat();
        let fewer = PoolRunConfig {
            plan,
            ..config.clone()
        };
        try_config(&fewer, seed).err()
    };
    let violation = fails(&storm)?;
    Some(shrink_plan(storm, violation, fails))
}

/// Draws two to four zones with some elements and users each, and the actions on them.
#[must_use]
pub fn draw_run_config(seed: u64) -> PoolRunConfig {
    // Use a random stream other than the world's.
    let mut random = Random::new(seed ^ 0x5eed_5eed_5eed_5eed);
    let zones: Vec<ZoneConfig> = (0..2 + random.below(3))
        .map(|_| ZoneConfig {
            elements: 1 + random.below(6) as u32,
            users: 1 + random.below(4) as u32,
        })
        .collect();
    let workload = Workload::for_utilisation(1e6, 2e5, 1.0, 0.05);
    let choice = match random.chance(0.5) {
        true => ElementChoice::LeastUsed,
        false => ElementChoice::LeastUsedDpf(1e-5),
    };
    let mut config = PoolRunConfig::new(zones, 1.0, 20.0, choice, workload);
    if random.chance(0.5) {
        let loss = 0.02 * random.fraction();
        let lossy = |link: &mut LinkProperties| link.loss = loss;
        config.links.iter_mut().flatten().for_each(lossy);
    }
    shorten_timers(&mut config);
    if random.chance(0.5) {
        config.registration_life = Duration::from_secs(12);
    }
    config.runtime = Time::from_secs_f64(RECOVERY_S + 2.0);
    config.invariants = Some(Invariants {
        faults_end: Time::from_secs_f64(FAULTS_S),
        recovery_deadline: Time::from_secs_f64(RECOVERY_S),
        two_homes_max: Time::from_secs_f64(10.0),
    });
    for _ in 0..3 + random.below(8) {
        add_fault(&mut config, &mut random);
    }
    end_faults(&mut config, &mut random);
    config.plan.sort_by_key(|(at, _)| *at);
    config
}

/// Shortens the timers, so that more happens per second.
fn shorten_timers(config: &mut PoolRunConfig) {
    let registrar = &mut config.registrar;
    registrar.keep_alive_interval = Duration::from_secs(2);
    registrar.keep_alive_timeout = Duration::from_millis(2_500);
    registrar.heartbeat_cycle = Duration::from_secs(1);
    registrar.last_heard_max = Duration::from_millis(5_500);
    registrar.no_response_max = Duration::from_millis(2_500);
    registrar.retry_interval = Duration::from_millis(300);
    registrar.table_elements_max = 3;
    registrar.batch_elements_max = 2;
    config.association_timeout = Duration::from_secs(3);
}

fn pick_element(config: &PoolRunConfig, random: &mut Random) -> (u16, u32) {
    let zone = random.below(config.zones.len());
    let element = random.below(config.zones[zone].elements as usize);
    (zone as u16, element as u32)
}

fn add_fault(config: &mut PoolRunConfig, random: &mut Random) {
    let at = Time::from_secs_f64(1.0 + (FAULTS_S - 15.0) * random.fraction());
    let later = at + Time::from_secs_f64(0.2 + 12.0 * random.fraction());
    let (zone, element) = pick_element(config, random);
    let other = (usize::from(zone) + 1 + random.below(config.zones.len() - 1)) % config.zones.len();
    let other = other as u16;
    let (begins, ends) = match random.below(4) {
        0 => (
            PoolAction::KillRegistrar(zone),
            PoolAction::StartRegistrar(zone),
        ),
        1 => (PoolAction::Cut(zone, other), PoolAction::Mend(zone, other)),
        2 => (
            PoolAction::Kill { zone, element },
            PoolAction::Start { zone, element },
        ),
        _ => (
            PoolAction::Stop { zone, element },
            PoolAction::Start { zone, element },
        ),
    };
    config.plan.push((at, begins));
    if random.chance(0.7) {
        config.plan.push((later, ends));
    }
}

/// Ends all faults. Some dead elements stay dead, but at least one in each zone lives.
fn end_faults(config: &mut PoolRunConfig, random: &mut Random) {
    let calm = Time::from_secs_f64(FAULTS_S);
    config.plan.push((calm, PoolAction::EndLoss));
    let zones = config.zones.len() as u16;
    for zone in 0..zones {
        config.plan.push((calm, PoolAction::StartRegistrar(zone)));
        for other in zone + 1..zones {
            config.plan.push((calm, PoolAction::Mend(zone, other)));
        }
        for element in 0..config.zones[usize::from(zone)].elements {
            if element == 0 || random.chance(0.6) {
                config
                    .plan
                    .push((calm, PoolAction::Start { zone, element }));
            }
        }
    }
}
