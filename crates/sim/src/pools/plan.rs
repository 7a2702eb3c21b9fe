//! Planned actions on the world.

use super::config::Action;
use super::world::World;

impl World<'_> {
    pub(super) fn act(&mut self, action: Action) {
        match action {
            Action::Stop { zone, element } => {
                let index = self.element_index(zone, element);
                self.stop_element(index);
            }
            Action::Start { zone, element } => {
                let index = self.element_index(zone, element);
                self.start_element(index);
            }
            Action::Kill { zone, element } => {
                let index = self.element_index(zone, element);
                self.kill_element(index);
            }
            Action::KillRegistrar(zone) => self.kill_registrar(usize::from(zone)),
            Action::StartRegistrar(zone) => self.start_registrar(usize::from(zone)),
            Action::Cut(a, b) => self.network.set_cut(a, b, true),
            Action::Mend(a, b) => {
                self.network.set_cut(a, b, false);
                self.send_queued();
            }
            Action::EndLoss => self.network.clear_loss(),
        }
    }

    /// Returns the index among all elements of a zone's element.
    pub(super) fn element_index(&self, zone: u16, element: u32) -> usize {
        let before = &self.config.zones[..usize::from(zone)];
        let before: u32 = before.iter().map(|zone| zone.elements).sum();
        (before + element) as usize
    }
}
