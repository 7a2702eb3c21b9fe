//! Invariants despite faults, checked during a run and at its end.

use super::world::PoolWorld;
use crate::Violation;
use crate::time::Time;
use holdfast_proto::registrar::Registrar;
use holdfast_wire::rserpool::{ElementId, RegistrarId};
use std::collections::{BTreeMap, BTreeSet};

/// The invariants to check.
#[derive(Debug, Clone, Copy)]
pub struct Invariants {
    /// Time at which all faults end, counted from `begin`.
    pub faults_end: Time,
    /// Time by which all must be well.
    pub recovery_deadline: Time,
    /// Maximum time for which two registrars may both believe that they are an element's home, without faults.
    pub two_homes_max: Time,
}

/// Interval between two checks of the invariants.
pub(super) const CHECK_INTERVAL: Time = Time(500_000_000);

/// State that the oracle keeps between its checks.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// Since when each element has had two homes.
    two_homes_since: BTreeMap<ElementId, Time>,
    pub(super) violation: Option<Violation>,
}

impl PoolWorld<'_> {
    pub(super) fn check(&mut self, invariants: Invariants) {
        let faults_end = self.config.begin + invariants.faults_end;
        self.check_homes(invariants, faults_end);
        if self.now >= self.config.begin + invariants.recovery_deadline {
            self.check_recovered(faults_end);
        }
    }

    fn set_violation(&mut self, what: String) {
        let at = self.now;
        self.oracle.violation.get_or_insert(Violation {
            at,
            description: what,
        });
    }

    /// Checks that no element has two monitoring registrars for longer than allowed, without faults.
    fn check_homes(&mut self, invariants: Invariants, faults_end: Time) {
        let mut owners: BTreeMap<ElementId, u32> = BTreeMap::new();
        for registrar in self
            .registrars
            .iter()
            .filter_map(|node| node.machine.as_ref())
        {
            let own_id = registrar.id();
            registrar.visit_all_elements(|_, element| {
                if element.home == own_id {
                    *owners.entry(element.id).or_default() += 1;
                }
            });
        }
        let shared: BTreeSet<ElementId> = owners
            .into_iter()
            .filter(|(_, owners)| *owners > 1)
            .map(|(id, _)| id)
            .collect();
        self.oracle
            .two_homes_since
            .retain(|id, _| shared.contains(id));
        for id in shared {
            let since = *self.oracle.two_homes_since.entry(id).or_insert(self.now);
            if self.now.since(since.max(faults_end)) > invariants.two_homes_max {
                self.set_violation(format!("element {} has two homes", id.0));
            }
        }
    }

    /// Checks the registrars' views, and that every user's requests have been served since the end of faults.
    fn check_recovered(&mut self, faults_end: Time) {
        // Live elements, each with the home registrar that it knows.
        let elements = self.elements.iter();
        let live: BTreeMap<ElementId, Option<RegistrarId>> = elements
            .filter_map(|node| node.machine.as_ref())
            .map(|element| (element.id(), element.home()))
            .collect();
        let nodes = self.registrars.iter();
        let machines: Vec<&Registrar> = nodes.filter_map(|node| node.machine.as_ref()).collect();
        let homes: BTreeSet<RegistrarId> = machines.iter().map(|machine| machine.id()).collect();
        let mut errors = Vec::new();
        for machine in &machines {
            check_view(machine, &live, &homes, &mut errors);
        }
        for home in homes {
            let views: BTreeSet<u16> = machines.iter().map(|view| view.checksum(home)).collect();
            if views.len() > 1 {
                errors.push(format!("views of registrar {}'s elements differ", home.0));
            }
        }
        for (index, user) in self.users.iter().enumerate() {
            if user
                .in_progress_since()
                .is_some_and(|since| since < faults_end)
            {
                let calm = faults_end.as_secs_f64();
                errors.push(format!("user {index} has waited since {calm} s"));
            }
        }
        if let Some(what) = errors.into_iter().next() {
            self.set_violation(what);
        }
    }
}

/// Checks that each live element is in a registrar's view with a live home, the same as the element knows, and that no
/// dead element is.
fn check_view(
    registrar: &Registrar,
    live: &BTreeMap<ElementId, Option<RegistrarId>>,
    homes: &BTreeSet<RegistrarId>,
    errors: &mut Vec<String>,
) {
    let own_id = registrar.id().0;
    let mut seen = BTreeSet::new();
    registrar.visit_all_elements(|_, element| {
        let (id, home) = (element.id.0, element.home.0);
        seen.insert(element.id);
        let problem = match live.get(&element.id) {
            None => "has ended but is listed".to_owned(),
            Some(_) if !homes.contains(&element.home) => {
                format!("has a home that has ended, {home}")
            }
            Some(Some(own)) if *own != element.home => format!("has home {}, not {home}", own.0),
            Some(_) => return,
        };
        errors.push(format!("registrar {own_id}: element {id} {problem}"));
    });
    let missing = live.keys().find(|id| !seen.contains(*id));
    errors.extend(missing.map(|id| format!("registrar {own_id} does not know element {}", id.0)));
}
