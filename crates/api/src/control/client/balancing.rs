//! Requests to the conductor of a node.

use super::{ClientError, ControlClient};
use crate::control::{
    BalanceLog, BalancePlan, BalanceRequest, BalanceStatus, DrainReport, DrainRequest, PinRequest,
};

impl ControlClient {
    /// `POST /v1/drain`: begins a drain of this node, or changes its deadline.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn drain(&self, request: &DrainRequest) -> Result<DrainReport, ClientError> {
        self.post("/v1/drain", request).await
    }

    /// `GET /v1/drain`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn drain_report(&self) -> Result<DrainReport, ClientError> {
        self.get("/v1/drain").await
    }

    /// `POST /v1/undrain`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn undrain(&self) -> Result<DrainReport, ClientError> {
        self.post("/v1/undrain", &()).await
    }

    /// `POST /v1/nodes/{name}/drain`: begins a drain of the named node, or changes its deadline.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn drain_node(
        &self,
        name: &str,
        request: &DrainRequest,
    ) -> Result<DrainReport, ClientError> {
        self.post(&format!("/v1/nodes/{name}/drain"), request).await
    }

    /// `GET /v1/nodes/{name}/drain`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn node_drain_report(&self, name: &str) -> Result<DrainReport, ClientError> {
        self.get(&format!("/v1/nodes/{name}/drain")).await
    }

    /// `POST /v1/nodes/{name}/undrain`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn undrain_node(&self, name: &str) -> Result<DrainReport, ClientError> {
        self.post(&format!("/v1/nodes/{name}/undrain"), &()).await
    }

    /// `POST /v1/balance/pins`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pin(&self, request: &PinRequest) -> Result<BalanceStatus, ClientError> {
        self.post("/v1/balance/pins", request).await
    }

    /// `GET /v1/balance`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn balance(&self) -> Result<BalanceStatus, ClientError> {
        self.get("/v1/balance").await
    }

    /// `POST /v1/balance`: switches balancing on or off at this node.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn set_balancing(&self, on: bool) -> Result<BalanceStatus, ClientError> {
        self.post("/v1/balance", &BalanceRequest { on }).await
    }

    /// `POST /v1/balance/now`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn balance_now(&self) -> Result<BalancePlan, ClientError> {
        self.post("/v1/balance/now", &()).await
    }

    /// `GET /v1/balance/plan`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn balance_plan(&self) -> Result<BalancePlan, ClientError> {
        self.get("/v1/balance/plan").await
    }

    /// `GET /v1/balance/log`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn balance_log(&self) -> Result<BalanceLog, ClientError> {
        self.get("/v1/balance/log").await
    }
}
