"""Tenants: several supernets on the same workers, each with its engine, table and SLO.

* `tenant`: `Tenant`, what one of them brings.
* `tenant_batcher`: `TenantBatcher`, which serves them and plans periodically which worker serves whom.
"""
