//! Planned actions on the world.

use super::config::PoolAction;
use super::world::PoolWorld;
use crate::associations::AssociationWorld;

impl PoolWorld<'_> {
    pub(super) fn execute_planned_action(&mut self, action: PoolAction) {
        match action {
            PoolAction::Stop { zone, element } => {
                let index = self.element_index(zone, element);
                self.stop_element(index);
            }
            PoolAction::Start { zone, element } => {
                let index = self.element_index(zone, element);
                self.start_element(index);
            }
            PoolAction::Kill { zone, element } => {
                let index = self.element_index(zone, element);
                self.kill_element(index);
            }
            PoolAction::KillRegistrar(zone) => self.kill_registrar(usize::from(zone)),
            PoolAction::StartRegistrar(zone) => self.start_registrar(usize::from(zone)),
            PoolAction::Cut(a, b) => self.network.set_cut(a, b, true),
            PoolAction::Mend(a, b) => {
                self.network.set_cut(a, b, false);
                self.send_queued();
            }
            PoolAction::EndLoss => self.network.clear_loss(),
        }
    }

    /// Returns the index among all elements of a zone's element.
    pub(super) fn element_index(&self, zone: u16, element: u32) -> usize {
        let before = &self.config.zones[..usize::from(zone)];
        let before: u32 = before.iter().map(|zone| zone.elements).sum();
        (before + element) as usize
    }
}
