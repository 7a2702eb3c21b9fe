//! Requests about process migration.

use super::{ClientError, ControlClient, query_text};
use crate::control::{
    MigrationAccepted, MigrationList, MigrationRequest, MigrationStatus, ProcessCheck,
    ProcessCheckQuery, UnitEntry,
};

impl ControlClient {
    /// `GET /v1/units/{unit}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn unit(&self, unit: &str) -> Result<UnitEntry, ClientError> {
        // A backslash is the only character of a unit name that the path of a URL cannot have.
        let unit = unit.replace('\\', "%5C");
        self.get(&format!("/v1/units/{unit}")).await
    }

    /// `GET /v1/processes/{pid}/check`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn check(&self, pid: i32) -> Result<ProcessCheck, ClientError> {
        self.get(&format!("/v1/processes/{pid}/check")).await
    }

    /// `GET /v1/processes/{pid}/check?to=NODE`: also asks that node whether it takes the process.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn check_to(&self, pid: i32, node: &str) -> Result<ProcessCheck, ClientError> {
        let to = Some(node.to_owned());
        let query = query_text(&ProcessCheckQuery { to })?;
        self.get(&format!("/v1/processes/{pid}/check{query}")).await
    }

    /// `POST /v1/migrations`: starts a migration.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn migrate(
        &self,
        request: &MigrationRequest,
    ) -> Result<MigrationAccepted, ClientError> {
        self.post("/v1/migrations", request).await
    }

    /// `GET /v1/migrations`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn migrations(&self) -> Result<MigrationList, ClientError> {
        self.get("/v1/migrations").await
    }

    /// `GET /v1/migrations/{id}`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn migration(&self, id: u64) -> Result<MigrationStatus, ClientError> {
        self.get(&format!("/v1/migrations/{id}")).await
    }

    /// `POST /v1/migrations/{id}/cancel`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn cancel_migration(&self, id: u64) -> Result<MigrationStatus, ClientError> {
        self.post(&format!("/v1/migrations/{id}/cancel"), &()).await
    }
}
